"""save_pretrained of a sharded model of transformers or PEFT: its weights are streamed, unit by
unit.

Invariants: transformers writes everything but the weights (config, generation config, custom code)
and says which weights a file has, by its own functions on meta tensors. The files load by plain
from_pretrained, in the dtypes that the weights train in, which the config names.

Tensors that transformers converts back (Mixtral's experts) are converted unit by unit, when all
tensors of the unit are gathered.

Of a PEFT model only the tensors that PEFT saves are gathered, on rank 0, and PEFT writes them.

A model of transformers or PEFT implies that the library is imported, so it is never imported here.
Private names of transformers are in this file alone; tested with transformers 5.24 and PEFT 0.21.
Other calls go to the library's own method: see `SavePretrained` and `SaveAdapters`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

from shardcore.checkpoint.consolidate import (
    Layout,
    Part,
    Plan,
    Tensors,
    as_trained,
    in_order,
    of_engine,
    on_first_rank,
    plan_of,
    state_dict_of,
    write_files,
)
from shardcore.checkpoint.format import plain_name, with_extra_state
from shardcore.checkpoint.safetensors import INDEX, SINGLE
from shardcore.engine.agreement import together
from shardcore.engine.engine import Engine
from shardcore.engine.hooks import Method
from shardcore.torch_private import is_persistent

_Revert: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class SavePretrained(Method):
    """`model.save_pretrained`: called on every rank, it streams.

    transformers' own method runs where the weights are given (`state_dict=`), where this rank reads
    its own weights, and for adapters, quantized models, `push_to_hub` and
    `distributed_checkpoint`.
    """

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the model for from_pretrained; see transformers. Collective."""
        own, given = _call_of(self.model, save_directory, *args, **kwargs)
        if self.engine is None or not _streams(self.engine, given):
            own(save_directory, *args, **kwargs)
            return
        save_pretrained(
            self.engine,
            Path(save_directory),
            lambda: own(**{**given, "state_dict": {}, "is_main_process": True}),
            max_shard_size=given["max_shard_size"],
            variant=given.get("variant"),
            save_original_format=given.get("save_original_format", True),
        )


class SaveAdapters(Method):
    """`save_pretrained` of a PEFT model: called on every rank, it gathers what PEFT saves, to
    rank 0.

    PEFT's own method runs where the weights are given (`state_dict=`), where this rank reads its
    own weights, and for prompts, which PEFT does not take from a state dict.
    """

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the adapters; see PEFT. Collective."""
        own, given = _call_of(self.model, save_directory, *args, **kwargs)
        if (
            self.engine is None
            or _reads_own(self.engine)
            or given.get("state_dict") is not None
            or given.get("path_initial_model_for_weight_conversion") is not None
        ):
            own(save_directory, *args, **kwargs)
            return
        options = {**given, "is_main_process": True}
        if not save_adapters(self.engine, lambda st: own(**{**options, "state_dict": st}), **given):
            own(save_directory, *args, **kwargs)


class MergeAndUnload(Method):
    """`merge_and_unload` of a PEFT model, which would merge into empty weights at stage 3."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Merge the adapters; see PEFT. RuntimeError while weights are sharded."""
        model: Any = self.model
        buckets = [] if self.engine is None else self.engine.buckets
        if any(bucket.weight.numel() < bucket.layout.numel for bucket in buckets):
            raise RuntimeError(
                "merge_and_unload: the weights are sharded (stage 3). To export the merged model, "
                "call shardcore.consolidate(model, FOLDER, merge_adapters=True) on every rank"
            )
        return model.base_model.merge_and_unload(*args, **kwargs)


def _call_of(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class's own save_pretrained of a model, and the arguments of a call by name."""
    own = partial(type(model).save_pretrained, model)
    bound = inspect.signature(own).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given.update(given.pop("kwargs", {}))
    return own, given


def _reads_own(engine: Engine) -> bool:
    return engine.own_weights or engine.gathered.covers(engine.managed)


def saves_adapters(model: nn.Module) -> bool:
    """Whether `save_pretrained` of this sharded model is that of PEFT."""
    return isinstance(vars(model).get("save_pretrained"), SaveAdapters)


def save_adapters(
    engine: Engine,
    write: Callable[[dict[str, torch.Tensor]], object],
    *,
    selected_adapters: Sequence[str] | None = None,
    save_embedding_layers: str | bool = "auto",
    **_: object,
) -> bool:
    """Let rank 0 `write` an ordinary state dict of the tensors that PEFT saves: masters in float32.
    False, with nothing written, if PEFT saves others. Collective.

    The options are those of PEFT's save_pretrained.
    """
    with together(engine.everyone, "save_pretrained", "nothing was written"):
        tensors = _saved_by_peft(engine, selected_adapters, save_embedding_layers)
    if tensors is None:
        return False

    def save(values: Iterator[torch.Tensor]) -> list[Path]:
        write(state_dict_of(engine, tensors, values))
        return []

    on_first_rank("save_pretrained", engine, tensors, save)
    return True


def _saved_by_peft(
    engine: Engine, adapters: Sequence[str] | None, save_embedding_layers: str | bool
) -> Tensors | None:
    """Return the tensors of the model that PEFT saves; None if it saves others."""
    model: Any = engine.model
    peft: Any = import_module("peft")
    tensors, name_of = of_engine(engine, None), {t: n for n, t in in_order(engine).items()}
    state = {
        plain_name(key): tensors[name_of[tensor]] for key, tensor in named_state(engine).items()
    }
    saved: set[torch.Tensor] = set()
    for adapter in adapters or model.peft_config:
        if model.peft_config[adapter].is_prompt_learning:
            return None
        saved.update(
            peft.get_peft_model_state_dict(
                model,
                state_dict=dict(state),
                adapter_name=adapter,
                save_embedding_layers=save_embedding_layers,
            ).values()
        )
    if not saved.issubset(tensors.values()):
        return None
    return {name: tensor for name, tensor in tensors.items() if tensor in saved}


def attach(model: nn.Module, engine: Engine) -> None:
    """Let `model.save_pretrained` of a sharded model of transformers or PEFT stream."""
    there = vars(model).get("save_pretrained")
    if there is not None and not isinstance(there, Method):
        return
    adapted = getattr(sys.modules.get("peft"), "PeftModel", None)
    if can_stream(model):
        model.__dict__["save_pretrained"] = SavePretrained(model, engine)
    elif (
        adapted is not None
        and isinstance(model, adapted)
        and type(model).save_pretrained is adapted.save_pretrained
    ):
        model.__dict__["save_pretrained"] = SaveAdapters(model, engine)
        model.__dict__["merge_and_unload"] = MergeAndUnload(model, engine)


def can_stream(model: nn.Module) -> bool:
    """Whether this is a transformers model whose weights `save_pretrained` can stream."""
    if not is_transformers(model):
        return False
    modeling: Any = sys.modules["transformers.modeling_utils"]
    own: Any = type(model)
    return (
        hasattr(modeling, "remove_tied_weights_from_state_dict")
        and hasattr(modeling, "revert_weight_conversion")
        and own.save_pretrained is modeling.PreTrainedModel.save_pretrained
        and own.state_dict is nn.Module.state_dict
        and _streams_quantized(model)
        and not getattr(model, "_hf_peft_config_loaded", False)
        and not with_extra_state(model)
    )


def _streams_quantized(model: Any) -> bool:
    """Whether the model is in bitsandbytes' 4 bits, or not quantized."""
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(quantizer, "quantization_config", None)
    return quantizer is None or getattr(config, "load_in_4bit", False) is True


def is_transformers(model: nn.Module) -> bool:
    """Whether this is a model of transformers."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def adapter_names(model: Any, state: Tensors) -> dict[str, str]:
    """Return the names in the adapter's file of the tensors of a PEFT model that PEFT saves, by
    their names in the model's `state`.
    """
    peft: Any = import_module("peft")
    adapters = model.active_adapters
    if len(adapters) != 1:
        raise ValueError(f"stream_params: the adapters {adapters} are active; expected one")
    saved = peft.get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=adapters[0], save_embedding_layers=False
    )
    name_of = {tensor: name for name, tensor in state.items()}
    return {name_of[tensor]: name for name, tensor in saved.items()}


def _streams(engine: Engine, given: Mapping[str, Any]) -> bool:
    return (
        can_stream(engine.model)
        and not _reads_own(engine)
        and given.get("state_dict") is None
        and not given.get("push_to_hub")
        and not given.get("distributed_checkpoint")
        and given.get("safe_serialization", True)
    )


def save_pretrained(
    engine: Engine,
    folder: Path,
    save_rest: Callable[[], object],
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
) -> list[Path]:
    """Write the weights of a sharded transformers model as its save_pretrained does. Collective.

    save_rest: writes all other files. Rank 0 calls it when the weights are complete.
    """
    model: Any = engine.model
    with together(engine.everyone, "save_pretrained", "nothing was written"):
        plan = _plan(engine, save_original_format)
        layout = hub_layout(
            plan.targets, folder, max_shard_size, variant, total_parameters=model.num_parameters()
        )
    with _keeps_state_dict(model), _without_progress():
        return write_files("save_pretrained", engine, layout, plan, save_rest)


@contextmanager
def _without_progress() -> Iterator[None]:
    """Show no progress of transformers: it writes no weights here."""
    logging: Any = import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _keeps_state_dict(model: Any) -> Iterator[None]:
    """Let save_pretrained of a quantized model use the state dict that it is given: transformers
    asks the quantizer for another, and without one gathers the model's.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None) or SimpleNamespace()
    quantizer.get_state_dict_and_metadata = lambda model: ({}, {})
    try:
        yield
    finally:
        del quantizer.get_state_dict_and_metadata


def save_weights(engine: Engine, folder: Path, max_shard_size: int | str) -> list[Path]:
    """Write the weights of any sharded model, in the dtypes that they train in, as Accelerate's
    save_model does: tied weights under their first name. Collective.
    """
    with together(engine.everyone, "save_model", "nothing was written"):
        tensors = first_names(engine)
        plan = plan_of(engine, tensors, [Part([name], [name]) for name in tensors], tensors)
        layout = hub_layout(plan.targets, folder, max_shard_size)
    return write_files("save_model", engine, layout, plan)


def first_names(engine: Engine) -> Tensors:
    """Return the state dict of a sharded model in its order, on the meta device, in the dtypes that
    weights train in; tied weights under their first name.
    """
    trained, name_of = as_trained(engine), {t: n for n, t in in_order(engine).items()}
    names = dict.fromkeys(name_of[tensor] for tensor in named_state(engine).values())
    return {name: trained[name] for name in names}


def hub_layout(
    tensors: Tensors,
    folder: Path,
    max_shard_size: int | str,
    variant: str | None = None,
    **metadata: int,
) -> Layout:
    """Return the files into which Hugging Face's libraries split a state dict."""
    hub: Any = import_module("huggingface_hub")
    single, index_name = (_with_variant(name, variant) for name in (SINGLE, INDEX))
    split = hub.split_torch_state_dict_into_shards(
        tensors,
        filename_pattern=single.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    index = {"metadata": {**metadata, **split.metadata}, "weight_map": split.tensor_to_filename}
    files = split.filename_to_tensors or {single: []}
    return Layout(folder, files, index if split.is_sharded else None, single, index_name)


def _with_variant(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def named_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by the names of the model's state dict, and in
    its order; shared ones under each name.
    """
    state = {}
    for prefix, module in engine.model.named_modules(remove_duplicate=False):
        tables: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers)
        for key, tensor in (item for table in tables for item in table.items()):
            if tensor is not None and is_persistent(module, key):
                state[f"{prefix}.{key}".lstrip(".")] = tensor
    return state


def _plan(engine: Engine, save_original_format: bool) -> Plan:
    model: Any = engine.model
    modeling: Any = import_module("transformers.modeling_utils")
    trained = as_trained(engine)
    name_of = {tensor: name for name, tensor in in_order(engine).items()}
    source_of = {key: name_of[tensor] for key, tensor in named_state(engine).items()}
    state = {key: trained[name] for key, name in source_of.items()}
    for key in model._keys_to_ignore_on_save or ():
        state.pop(key, None)
    state = modeling.remove_tied_weights_from_state_dict(state, model)
    # by the names that transformers' functions know, without wrappers around modules
    key_of = {source_of[key]: plain_name(key) for key in state}
    saved = {plain_name(key): tensor for key, tensor in state.items()}
    sources = {name: trained[name] for name in trained if name in key_of}
    if not save_original_format:
        return plan_of(engine, sources, [Part([name], [key_of[name]]) for name in sources], saved)
    tensor_of = in_order(engine)
    unit_of = {}
    for name in key_of:
        bucket: Any = engine.bucket_of.get(tensor_of[name])  # type: ignore[call-overload]
        unit_of[name] = "" if bucket is None else bucket.unit
    return plan_of(engine, sources, *as_in_files(model, key_of, saved, unit_of))


def as_in_files(
    model: Any, key_of: Mapping[str, str], saved: Tensors, unit_of: Mapping[str, str]
) -> tuple[list[Part], dict[str, torch.Tensor]]:
    """Return how the tensors of a model of transformers become those in its files: each renamed
    tensor alone, the converted ones of a unit together. And these, on the meta device.

    saved: the tensors of the model by `key_of` their names.
    """
    modeling: Any = import_module("transformers.modeling_utils")
    revert: _Revert = partial(modeling.revert_weight_conversion, model)
    made = revert(dict(saved))
    # with memory of their own, by which Hugging Face's split counts bytes: some are views of others
    targets = {name: torch.empty_like(tensor) for name, tensor in made.items()}
    # a renamed tensor is the same object
    target_of = {tensor: name for name, tensor in made.items()}
    renamed = {
        name: target_of[saved[key]] for name, key in key_of.items() if saved[key] in target_of
    }
    parts = [Part([name], [target]) for name, target in renamed.items()]
    units: dict[str, list[str]] = {}
    for name in key_of:
        if name not in renamed:
            units.setdefault(unit_of[name], []).append(name)

    def converted(names: list[str]) -> Part:
        def make(values: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return revert({key_of[name]: values[name] for name in names})

        return Part(
            names, list(revert({key_of[name]: saved[key_of[name]] for name in names})), make
        )

    by_unit = [converted(names) for names in units.values()]
    made_by_unit = [name for part in by_unit for name in part.targets]
    if sorted(made_by_unit) == sorted(made.keys() - set(renamed.values())):
        return parts + by_unit, targets
    # tensors of several units become one
    return [*parts, converted([name for names in units.values() for name in names])], targets
