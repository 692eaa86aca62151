"""The demo's text and model: the same data for equal keys, other data for others; a model that
cannot look ahead.
"""

import math
import random

import pytest
import torch

from examples.corpus import Corpus, load_corpus, standard_library_files
from examples.gpt import PRESETS, build_gpt, next_byte_loss
from examples.training import learning_rate_factor, state_sha256

KEY = {"seed": 1, "rank": 0, "step": 3, "micro_step": 0, "batch": 4, "context": 32}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(random.Random(0).randbytes(100_000), "random bytes")


def test_the_standard_library_is_the_same_text_each_time():
    files = standard_library_files()
    assert len(files) > 200
    assert {file.suffix for file in files} == {".py"}
    assert not any("site-packages" in file.parts or "__pycache__" in file.parts for file in files)
    first, second = load_corpus(), load_corpus()
    assert first.sha256 == second.sha256
    assert first.data.numel() > 5_000_000


def test_a_file_is_read_or_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdefgh" * 1000)
    assert bytes(load_corpus(str(path)).data[:8].tolist()) == b"abcdefgh"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"corpus: .*text\.txt has 5 bytes; expected at least"):
        load_corpus(str(path))
    with pytest.raises(OSError, match="missing"):
        load_corpus(str(tmp_path / "missing"))


def test_batches_are_windows_of_the_text(corpus):
    tokens, targets = corpus.batch(**KEY)
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == targets.dtype == torch.int64
    text = bytes(corpus.data.tolist())
    for row, next_row in zip(tokens.tolist(), targets.tolist(), strict=True):
        start = text.index(bytes(row))
        assert bytes(next_row) == text[start + 1 : start + 33]


def test_batches_depend_on_their_key_alone(corpus):
    tokens, _ = corpus.batch(**KEY)
    torch.manual_seed(99)
    assert torch.equal(tokens, corpus.batch(**KEY)[0])
    for name in ("seed", "rank", "step", "micro_step"):
        assert not torch.equal(tokens, corpus.batch(**{**KEY, name: KEY[name] + 1})[0]), name


@pytest.mark.parametrize(
    "preset, millions", [("tiny", 0.13), ("cpu10m", 10.8), ("cpu26m", 25.5), ("gpu", 353)]
)
def test_preset_sizes(preset, millions):
    with torch.device("meta"):
        numel = sum(param.numel() for param in build_gpt(preset, 0).parameters())
    assert numel / 1e6 == pytest.approx(millions, rel=0.03)


def test_model_starts_near_the_uniform_loss_and_repeats_from_its_seed():
    state = torch.random.get_rng_state()
    model, same, other = build_gpt("tiny", 0), build_gpt("tiny", 0), build_gpt("tiny", 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (
        state_sha256(model.state_dict())
        == state_sha256(same.state_dict())
        != state_sha256(other.state_dict())
    )
    tokens = torch.randint(256, (2, 64))
    assert next_byte_loss(model(tokens), tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_model_does_not_look_ahead():
    model = build_gpt("tiny", 0)
    tokens = torch.randint(256, (1, PRESETS["tiny"].context))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40:], after[0, 40:])


def test_state_hash_sees_every_change():
    state = {"b": torch.arange(6.0), "a": torch.zeros(3, dtype=torch.bfloat16)}
    digest = state_sha256(state)
    assert digest == state_sha256({"a": state["a"].clone(), "b": state["b"].clone()})
    one_bit = state["b"].clone()
    one_bit.view(torch.int32)[5] ^= 1
    negative_zero = -state["a"]
    for changed in (
        {**state, "b": one_bit},
        {**state, "a": negative_zero},
        {**state, "b": state["b"].view(2, 3)},
        {"b": state["b"], "c": state["a"]},
        {"b": state["b"], "a": state["a"].half()},
        {"b": state["b"]},
    ):
        assert state_sha256(changed) != digest


def test_learning_rate_rises_then_falls():
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == max(factors) == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.1 <= factors[-1] < 0.11
