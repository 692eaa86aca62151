"""What parameters say of themselves at stage 3 by DeepSpeed's names: `ds_id`, `ds_shape`,
`ds_numel` and `ds_status`.

Libraries ask `hasattr(param, "ds_id")` to know whether a weight has to be gathered before it is
read, and `ds_status` whether it is there. They are attributes of the class nn.Parameter that only
sharded parameters have for `hasattr`; one that a parameter is given itself (by zero.Init, or by the
real DeepSpeed) is found first.
Source: the attributes documented at https://deepspeed.readthedocs.io/en/latest/zero3.html, 0.19.8.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from shardcore.engine.engine import Engine
from shardcore.engine.pieces import ZeroParamStatus
from shardcore.optim.interface import engine_of


class _OfSharded:
    """An attribute of nn.Parameter that sharded weights have. (Without __set__: an attribute of
    the object comes first.)
    """

    def __init__(self, name: str, value: Callable[[Engine, nn.Parameter], Any]) -> None:
        self._name, self._value = name, value

    def __get__(self, param: nn.Parameter | None, kind: type) -> Any:
        engine = None if param is None else engine_of(param)
        if (
            param is None
            or not isinstance(engine, Engine)
            or engine.unsharder is None
            or param not in engine.managed
        ):
            raise AttributeError(self._name)
        return self._value(engine, param)


def _status(engine: Engine, param: nn.Parameter) -> ZeroParamStatus:
    assert engine.unsharder is not None
    return (
        ZeroParamStatus.AVAILABLE
        if engine.unsharder.is_unsharded(param)
        else ZeroParamStatus.NOT_AVAILABLE
    )


_ATTRIBUTES: dict[str, Callable[[Engine, nn.Parameter], Any]] = {
    "ds_id": lambda engine, param: engine.managed[param].index,
    "ds_shape": lambda engine, param: param.shape,
    "ds_numel": lambda engine, param: param.numel(),
    "ds_status": _status,
}


def name_sharded_params() -> None:
    """Let sharded parameters have these attributes, in this process from now on."""
    for name, value in _ATTRIBUTES.items():
        setattr(nn.Parameter, name, _OfSharded(name, value))
