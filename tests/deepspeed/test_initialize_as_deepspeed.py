"""Calls of initialize that DeepSpeed takes: the same script has the same results under both
names.
"""

import importlib.util
import json
from typing import Any

import pytest

from tests.support.deepspeed_makes import CALLS
from tests.support.scripts import ROOT, run_forked

NAMES = [call.__name__ for call in CALLS]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both say, by the module."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("a comparison with DeepSpeed needs deepspeed")
    folder = tmp_path_factory.mktemp("found")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        for name in ("deepspeed", "shardcore"):
            run_forked(
                "tests.support.deepspeed_makes", name, str(folder / name), ranks=2, folder=ROOT
            )
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(close, one, other))
    return bool(one == (pytest.approx(other, rel=1e-4) if isinstance(one, float) else other))


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
def test_a_call_has_the_results_of_deepspeeds(found: dict[str, Any], name: str) -> None:
    assert close(found["shardcore"][name], found["deepspeed"][name]), found
