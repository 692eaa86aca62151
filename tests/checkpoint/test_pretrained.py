"""from_pretrained under zero.Init: ranks read their parts of the files, to the bits of the plain
one.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="transformers needs it for ZeRO 3")

import shardcore  # noqa: E402
from shardcore.checkpoint import pretrained  # noqa: E402
from shardcore.checkpoint.file_tensors import counts  # noqa: E402
from shardcore.deepspeed import zero_init  # noqa: E402
from shardcore.engine.pieces import has_piece, is_partitioned  # noqa: E402
from tests.support.huggingface import LORA, VOCAB, tiny, train_two_steps, zero3  # noqa: E402
from tests.support.models import error_of, hash_of  # noqa: E402
from tests.support.peak import Peak  # noqa: E402
from tests.support.ranks import run_fresh, run_ranks  # noqa: E402

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
Change = Callable[[Any], Any]


def _from_pretrained(folder: str, kind: str, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, kind).from_pretrained(
            folder, output_loading_info=True, **options
        )


def _resized(model: Any) -> Any:
    torch.manual_seed(5 + (0 if not _in_pieces(model) else torch.distributed.get_rank()))
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    return model


def _with_mean(model: Any) -> Any:
    torch.manual_seed(5)
    model.resize_token_embeddings(VOCAB + 8)
    return model


def _with_lora(model: Any) -> Any:
    import peft

    torch.manual_seed(5)
    words = LORA if model.config.model_type == "gpt2" else {"r": 4, "target_modules": ["q_proj"]}
    if model.config.num_labels == 1:
        words = {**words, "task_type": "SEQ_CLS"}  # which copies the new head
    return peft.get_peft_model(model, peft.LoraConfig(**words))


def _broken(model: Any) -> Any:
    """The broken twin: one element on one rank."""
    param = next(param for param in model.parameters() if is_partitioned(param))
    if torch.distributed.get_rank() == 1:
        param.ds_tensor[3] += 1e-2
    return model


def _same(model: Any) -> Any:
    return model


def _in_pieces(model: Any) -> bool:
    return any(has_piece(param) for param in model.parameters())


def _loaded_and_trained(
    rank: int,
    world_size: int,
    folder: str,
    kind: str,
    options: dict[str, Any],
    change: Change,
    under_zero3: bool,
    whole_bytes: int = 0,
) -> list[Any]:
    """Ranks other than 0 have other random numbers under zero3."""
    torch.manual_seed(rank if under_zero3 else 0)
    with pytest.MonkeyPatch.context() as patch, zero3(CONFIG) if under_zero3 else nullcontext():
        patch.setattr(zero_init, "WHOLE_BYTES", whole_bytes)
        model, info = _from_pretrained(folder, kind, options)
        if under_zero3:
            assert all(param.shape == (0,) for param in model.parameters())
        model = change(model)
    names = {key: sorted(map(str, value)) for key, value in info.items()}
    engine = shardcore.initialize(model=model, config=CONFIG)[0]
    losses = train_two_steps(engine, rank)
    state = engine.module.state_dict()
    return [sorted(state), hash_of(state.values()), losses, names]


LM, REWARD = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
HALF = {"dtype": torch.bfloat16}
LOADED: list[tuple[str, str, dict[str, Any], Change]] = [
    ("Llama", LM, {}, _same),
    ("Mixtral", LM, HALF, _same),
    ("GPT2", LM, {}, _same),
    ("Llama", REWARD, {"num_labels": 1, **HALF}, _same),
    ("GPT2", LM, HALF, _resized),
    ("Llama", LM, {}, _resized),
    ("Llama", LM, {}, _with_mean),
    ("Llama", LM, HALF, _with_lora),
    ("GPT2", REWARD, {"num_labels": 1}, _with_lora),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("made", "kind", "options", "change"), LOADED)
def test_files_become_the_bits_of_from_pretrained(
    tmp_path: Path, made: str, kind: str, options: dict[str, Any], change: Change
) -> None:
    tiny(made).save_pretrained(tmp_path, max_shard_size="50KB")
    run = (str(tmp_path), kind, options, change)
    plain = run_ranks(2, _loaded_and_trained, *run, False)
    for whole_bytes in (0, 1 << 27):
        assert run_ranks(2, _loaded_and_trained, *run, True, whole_bytes) == plain
    broken = (str(tmp_path), kind, options, _broken)
    if change is _same:
        assert run_ranks(2, _loaded_and_trained, *broken, True) != plain


def _other_formats(rank: int, world_size: int, folder: str, state_dict: bool) -> list[Any]:
    model = tiny("Llama")
    torch.manual_seed(rank)
    if state_dict:
        state, config = dict(model.state_dict()), model.config
        with zero3(CONFIG):
            loaded = transformers.LlamaForCausalLM.from_pretrained(
                None, config=config, state_dict=state
            )
    else:
        with zero3(CONFIG):
            loaded = _from_pretrained(folder, LM, {})[0]
    assert all(map(is_partitioned, loaded.parameters()))
    engine = shardcore.initialize(model=loaded, config=CONFIG)[0]
    return [hash_of(engine.module.state_dict().values()), hash_of(model.state_dict().values())]


@pytest.mark.more
@pytest.mark.parametrize("state_dict", [False, True])
def test_other_formats_are_read_by_transformers(tmp_path: Path, state_dict: bool) -> None:
    model = tiny("Llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for ours, expected in run_ranks(2, _other_formats, str(tmp_path), state_dict):
        assert ours == expected


def _made_from_config(rank: int, world_size: int, under_zero3: bool) -> list[Any]:
    config = tiny("GPT2").config
    torch.manual_seed(rank if under_zero3 else 0)
    with zero3(CONFIG) if under_zero3 else nullcontext():
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert _in_pieces(model) == under_zero3
    engine = shardcore.initialize(model=model, config=CONFIG)[0]
    state = engine.module.state_dict()
    # GPT-2 draws the projections of its blocks twice, in another order under ZeRO 3
    return [
        {name: list(value.shape) for name, value in state.items()},
        {name: round(value.std().item(), 2) for name, value in state.items()},
    ]


@pytest.mark.more
def test_from_config_initializes_on_rank_0() -> None:
    made, plain = (run_ranks(2, _made_from_config, under) for under in (True, False))
    assert made == plain
    assert made[0] == made[1]


class Remote(transformers.LlamaForCausalLM):
    """As code of the hub: reads and edits its weights while it is constructed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = torch.nn.Linear(8, 8)
        with torch.no_grad():
            self.extra.weight.copy_(torch.eye(8) * self.extra.weight.shape[0])
            self.extra.bias.data.fill_(0.5)
        self.rows = self.lm_head.weight.size(0)
        self.register_buffer("scale", self.extra.weight.norm().detach())

    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        return (out[0] * self.scale * self.extra.bias.sum() + self.extra.weight.sum(),)


def _remote(rank: int, world_size: int, folder: str, under_zero3: bool) -> list[Any]:
    torch.manual_seed(rank if under_zero3 else 0)
    with pytest.MonkeyPatch.context() as patch, zero3(CONFIG) if under_zero3 else nullcontext():
        patch.setattr(zero_init, "WHOLE_BYTES", 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Remote.from_pretrained(folder)
    assert model.rows == VOCAB
    engine = shardcore.initialize(model=model, config=CONFIG)[0]
    logits = engine(input_ids=torch.arange(8).view(1, 8))[0]
    return [hash_of(engine.module.state_dict().values()), logits.sum().item()]


def test_code_of_the_hub_reads_weights_in_its_constructor(tmp_path: Path) -> None:
    torch.manual_seed(1)
    Remote(tiny("Llama").config).save_pretrained(tmp_path)
    assert run_ranks(2, _remote, str(tmp_path), True) == run_ranks(2, _remote, str(tmp_path), False)


def _bytes_read(rank: int, world_size: int, folder: str) -> int:
    counts.clear()
    with zero3(CONFIG):
        _from_pretrained(folder, LM, {})
    return counts["bytes_read"]


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("made", ["Llama", "Mixtral"])
def test_files_are_read_once_in_all(tmp_path: Path, made: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    tiny(made, **sizes).save_pretrained(tmp_path, max_shard_size="200KB")
    read = run_ranks(3, _bytes_read, str(tmp_path))
    assert 0.95 < sum(read) / _bytes_of(tmp_path) <= 1.05
    assert max(read) < 0.5 * _bytes_of(tmp_path), "each rank reads its part"


def _refused(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> str:
    with zero3(CONFIG):
        return error_of(lambda: _from_pretrained(folder, LM, options))


def _folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    tiny("Llama").save_pretrained(folder, max_shard_size="50KB")
    return folder


def test_bad_files_are_refused_on_every_rank(tmp_path: Path) -> None:
    cut, absent, shape = (_folder(tmp_path, name) for name in ("cut", "absent", "shape"))
    file = sorted(cut.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    for message in run_ranks(2, _refused, str(cut), {}):
        assert file.name in message
    gone = sorted(absent.glob("*.safetensors"))[-1]
    gone.unlink()
    for message in run_ranks(2, _refused, str(absent), {}):
        assert gone.name in message
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + 1}))
    for message in run_ranks(2, _refused, str(shape), {}):
        assert "ignore_mismatched_sizes" in message
    for message in run_ranks(2, _refused, str(shape), {"ignore_mismatched_sizes": True}):
        assert message == "no error"
    for message in run_ranks(2, _refused, str(shape), {"device_map": "auto"}):
        assert "device_map" in message


def _torn_on_one_rank(rank: int, world_size: int, folder: str) -> str:
    if rank == 1:
        file = sorted(Path(folder).glob("*.safetensors"))[-1]
        torn = Path(f"{folder}-torn")
        shutil.copytree(folder, torn)
        (torn / file.name).write_bytes(file.read_bytes()[:-100])
        folder = str(torn)
    with zero3(CONFIG):
        return error_of(lambda: _from_pretrained(folder, LM, {}))


def test_a_file_that_is_torn_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    for message in run_ranks(2, _torn_on_one_rank, str(_folder(tmp_path, "good"))):
        assert "-torn" in message
        assert ".safetensors is torn" in message


def _untied(rank: int, world_size: int, folder: str, under_zero3: bool) -> bool:
    with zero3(CONFIG) if under_zero3 else nullcontext():
        model = _from_pretrained(folder, LM, {})[0]
    return model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_files_have_twice_stay_untied(tmp_path: Path) -> None:
    for same in (True, False):
        folder = tmp_path / str(same)
        model = tiny("Llama")
        if same:
            model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        for under_zero3 in (True, False):
            assert run_ranks(2, _untied, str(folder), under_zero3) == [same, same]


BIG = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
UNIT_BYTES = 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096)  # of a block, in bfloat16
ROOT_BYTES = 2 * 2 * 8192 * 1024


def _peak_of_loading(rank: int, world_size: int, folder: str, under_zero3: bool) -> int:
    """Of a frozen base, from from_pretrained to the end of initialize. Not under zero3 each rank
    has the whole model, in memory rather than in a map of the files.
    """
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_init, "WHOLE_BYTES", 8 << 20)
        with Peak() as peak:
            with zero3(config) if under_zero3 else nullcontext():
                model = _from_pretrained(folder, LM, HALF)[0]
            for param in () if under_zero3 else model.parameters():
                param.data = param.data.clone()
            model.requires_grad_(False)
            model.model.norm.weight.requires_grad_(True)
            shardcore.initialize(model=model, config=config)
    return peak.most


@pytest.mark.more
def test_a_rank_has_its_shard_and_two_units_in_memory(tmp_path: Path) -> None:
    run_fresh(_save_big, str(tmp_path))
    whole = _bytes_of(tmp_path)
    assert whole > 400e6
    warm = _folder(tmp_path, "warm")  # allocators and lazy imports
    run_ranks(2, _peak_of_loading, str(warm), True)
    bound = whole / 2 + 2 * max(UNIT_BYTES, ROOT_BYTES) + (64 << 20)
    for peak in run_ranks(2, _peak_of_loading, str(tmp_path), True):
        assert 0.45 * whole < peak < bound
    for peak in run_ranks(2, _peak_of_loading, str(tmp_path), False):
        assert peak > bound, "the whole model on each rank"


def _save_big(folder: str) -> None:
    tiny("Llama", **BIG).bfloat16().save_pretrained(folder, max_shard_size="100MB")


def _saved_before_shards(rank: int, world_size: int, folder: str) -> list[str]:
    with zero3(CONFIG):
        model, _ = _from_pretrained(folder, LM, {})
        with pytest.raises(RuntimeError, match=r"partitioned by zero\.Init"):
            model.save_pretrained(folder + "/empty")
        with shardcore.zero.GatheredParameters(list(model.parameters())):
            if rank == 0:
                model.save_pretrained(f"{folder}/full0")
    saved, _ = _from_pretrained(f"{folder}/full0", LM, {})
    plain, _ = _from_pretrained(folder, LM, {})
    assert all(map(torch.equal, saved.parameters(), plain.parameters()))
    return [path.name for path in Path(folder).glob("empty*")]


def test_partitioned_weights_are_not_saved_as_empty_ones(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    assert run_ranks(2, _saved_before_shards, str(tmp_path)) == [[], []]


def test_the_reader_is_installed_once() -> None:
    pretrained.read_into_pieces(nullcontext)
    kind = transformers.PreTrainedModel
    wrapped = kind._load_pretrained_model, kind._initialize_missing_keys
    pretrained.read_into_pieces(nullcontext)
    assert (kind._load_pretrained_model, kind._initialize_missing_keys) == wrapped
