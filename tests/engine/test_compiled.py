"""Compiled units: the bits of eager runs, one graph for each class of units at every stage, and a
model that otherwise stays as it is.
"""

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardcore
from shardcore.engine.compiled import compile_arguments, in_words
from shardcore.engine.hooks import detach
from shardcore.extras.activations import apply_activation_checkpointing
from tests.support.logs import logged
from tests.support.models import (
    Block,
    Run,
    adam,
    assert_one,
    batch_of,
    hash_of_training,
    loss_of,
    make_net,
    train,
)
from tests.support.ranks import run_ranks


class Graphs:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return self.run_of(graph)

    def run_of(self, graph: Any) -> Callable[..., Any]:
        return graph.forward  # type: ignore[no-any-return]


class WrongGraphs(Graphs):
    """A twin: a backend whose graphs are off by one bit in a thousand."""

    def run_of(self, graph: Any) -> Callable[..., Any]:
        return lambda *inputs: [value * (1 + 2**-10) for value in graph.forward(*inputs)]


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(graphs: Graphs) -> dict[str, Any]:
    """Return the arguments that let torch raise for a graph that is cut."""
    return {"backend": graphs, "fullgraph": True}


# --- bits -----------------------------------------------------------------------------------------

HOST = {"optimizer": "cpu", "gradients": "cpu"}
OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"overlap_step": True}),
    (2, {"offload": HOST}),
    (3, {}),
    (3, {"offload": {**HOST, "params": "cpu"}, "overlap_step": True, "cast_inputs": "units"}),
    (3, {"reshard_after_forward": False}),
]


def _hashes(rank: int, world_size: int, kind: Any, precision: str) -> list[tuple[str, int]]:
    """Return the hash of each training, and the number of graphs; the first one is eager."""
    found = []
    for stage, options in ((2, {}), *OPTIONS):
        torch._dynamo.reset()
        graphs = kind()
        compile = whole(graphs) if found else False
        run = Run(stage, steps=3, precision=precision, shard={**options, "compile": compile})
        model, optimizer, _ = train(rank, run)
        found.append((hash_of_training(model, optimizer), graphs.count))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bits_are_those_of_an_eager_run_with_one_graph_for_all_blocks(precision: str) -> None:
    for (eager, none), *compiled in run_ranks(2, _hashes, Graphs, precision):
        assert none == 0
        assert_one([eager, *(each for each, _ in compiled)])
        assert [count for _, count in compiled] == [1] * len(OPTIONS)


def test_a_wrong_graph_has_other_bits() -> None:
    (eager, _), *wrong = run_ranks(1, _hashes, WrongGraphs, "fp32")[0]
    assert eager not in [each for each, _ in wrong]


def _by_inductor(rank: int, world_size: int, options: dict[str, Any]) -> set[str]:
    hashes = set()
    for stage in range(4):
        torch._dynamo.reset()
        run = Run(
            stage, steps=3, shard={**options, "compile": {"fullgraph": "units" not in options}}
        )
        hashes.add(hash_of_training(*train(rank, run)[:2]))
    return hashes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"units": [Block, nn.Linear]}])
def test_stages_have_equal_bits_by_inductor(options: dict[str, Any]) -> None:
    assert len(set.union(*run_ranks(2, _by_inductor, options))) == 1


# --- graphs ---------------------------------------------------------------------------------------


def _language_model(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2}
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **drop, use_cache=False))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def _graphs_of_steps(
    kind: str, stage: int, adapt: Callable[[Any], Any] | None = None
) -> tuple[list[int], list[float]]:
    """Return how many graphs there were after each step, and the losses. Every batch has its own
    values. fullgraph=True raises for a graph that is cut.
    """
    torch._dynamo.reset()
    model = _language_model(kind)
    model = model if adapt is None else adapt(model)
    graphs = Graphs()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = shardcore.FusedAdam(trained, lr=1e-3)
    model.train()
    model, optimizer = shardcore.shard(model, optimizer, stage, compile=whole(graphs))
    counts, losses = [], []
    for step in range(4):
        made = torch.Generator().manual_seed(step)
        tokens = torch.randint(2, 40, (2, 12), generator=made)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(graphs.count)
        losses.append(loss.item())
    return counts, losses


@pytest.mark.more
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_real_models_have_one_graph_for_all_blocks_and_none_later(kind: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    plain, three = (_graphs_of_steps(kind, stage) for stage in (0, 3))
    assert plain == three
    assert plain[0] == [1] * 4


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    # one block of three has no adapter
    targets = r".*layers\.[01]\..*(q_proj|down_proj)"
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


@pytest.mark.more
@pytest.mark.parametrize(("adapt", "most"), [(_checkpointed, 1), (_with_lora, 3)])
def test_checkpointed_and_adapted_models_recompile_nothing(adapt: Any, most: int) -> None:
    """With adapters the first block, whose input needs no gradient, and the last one, without an
    adapter, have graphs of their own.
    """
    pytest.importorskip("peft", reason="PEFT is not installed")
    plain, three = (_graphs_of_steps("llama", stage, adapt) for stage in (0, 3))
    assert plain == three
    assert plain[0] == [most] * 4


@pytest.mark.more
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generate_with_a_cache_gives_the_tokens_of_an_eager_model(kind: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    prompt = torch.arange(2, 14).view(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "eos_token_id": None}
    expected = _language_model(kind).eval().generate(prompt, **options)
    for stage in (0, 3):
        torch._dynamo.reset()
        graphs = Graphs()
        model = _language_model(kind).eval()
        model, _ = shardcore.shard(model, None, stage, compile={"backend": graphs})
        assert torch.equal(model.generate(prompt, **options), expected)
        assert graphs.count > 0


class Counting(Block):
    """A twin whose forward is another one at each step."""

    step = "0"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * {"0": 1.0, "00": 1.5, "000": 1.25}[self.step]


def test_a_recompilation_would_be_counted() -> None:
    model = make_net()
    model.blocks = nn.ModuleList([Counting(24, 37)])
    graphs = Graphs()
    model, optimizer = shardcore.shard(model, adam(model), 3, units=Counting, compile=whole(graphs))
    for step in range(3):
        model.blocks[0].step = "0" * (step + 1)
        loss_of(model, batch_of(step, 0, 0)).backward()
        optimizer.step()
    assert graphs.count == 3


def test_hooks_inside_of_a_graph_would_be_refused() -> None:
    """A twin: module.compile() compiles the hooks, too."""
    model, _ = shardcore.shard(make_net(), None, 3)
    for block in model.blocks:
        block.compile(**whole(Graphs()))
    with pytest.raises(Exception, match=r"Use shard\(compile=True\)"):
        model(batch_of(0, 0, 0)[0])


def test_nested_units_have_the_same_graphs_at_every_stage() -> None:
    found = []
    for stage in range(4):
        torch._dynamo.reset()
        graphs = Graphs()
        shard = {"units": [Block, nn.Linear], "compile": {"backend": graphs}}
        model, optimizer, _ = train(0, Run(stage, steps=3, shard=shard))
        found.append((hash_of_training(model, optimizer), graphs.count))
    assert found == [found[0]] * 4
    assert found[0][0] == hash_of_training(*train(0, Run(2, steps=3))[:2])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"offload_to_cpu": True}])
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointed_blocks_are_compiled_too(
    stage: int, options: dict[str, Any], when: str
) -> None:
    graphs, model = Graphs(), make_net()
    if when == "before":
        apply_activation_checkpointing(model, **options)
    model, optimizer = shardcore.shard(model, adam(model), stage, compile=whole(graphs))
    if when == "after":
        apply_activation_checkpointing(model, **options)
    eager = make_net()
    eager, eager_optimizer = shardcore.shard(eager, adam(eager), stage)
    for step in range(2):
        for each, its_optimizer in ((model, optimizer), (eager, eager_optimizer)):
            loss_of(each, batch_of(step, 0, 0)).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert_one([hash_of_training(model, optimizer), hash_of_training(eager, eager_optimizer)])
    assert graphs.count == 1


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_the_model_stays_as_it_is_and_its_copies_are_ordinary(stage: int) -> None:
    plain, graphs = make_net(), Graphs()
    model, _, _ = train(0, Run(stage, steps=1, shard={"compile": whole(graphs)}))
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [type(module) for module in model.modules()] == [*map(type, plain.modules())]
    x = batch_of(0, 0, 0)[0]
    with shardcore.full_params(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = model(x)
    before = graphs.count
    for each in copies:
        assert torch.equal(each(x), expected)
        apply_activation_checkpointing(each)
        assert torch.equal(each(x), expected)
    assert graphs.count == before


def test_detach_and_another_shard_bring_the_forward_back() -> None:
    model = make_net()

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    model.blocks[1].forward = twice
    graphs = Graphs()
    model, _ = shardcore.shard(model, None, 2, compile=whole(graphs))
    model(batch_of(0, 0, 0)[0])
    assert graphs.count == 2
    detach(model)
    assert "forward" not in vars(model.blocks[0])
    assert model.blocks[1].forward is twice


def test_a_compiled_model_is_gone_at_once() -> None:
    model, optimizer, _ = train(0, Run(3, steps=2, shard={"compile": whole(Graphs())}))
    parts = [weakref.ref(part) for part in (model, model._shardcore_engine, model.blocks[0])]
    del model, optimizer
    assert [part() for part in parts] == [None] * 3


@pytest.mark.parametrize("way", ["export", "make_fx", "trace"])
def test_a_compiled_model_is_traced_as_it_is(way: str) -> None:
    graphs = Graphs()
    model, _ = shardcore.shard(make_net(), None, 2, compile=whole(graphs))
    x = batch_of(0, 0, 0)[0]
    if way == "export":
        traced: Any = torch.export.export(model, (x,)).module()
    elif way == "make_fx":
        traced = make_fx(model)(x)
    else:
        traced = torch.jit.trace(model, (x,), check_trace=False)
    assert graphs.count == 0
    assert torch.equal(traced(x), make_net()(x))


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compile", "stage", "error", "match"),
    [
        ("inductor", 2, TypeError, "compile is 'inductor'; expected True, False or a dict"),
        ({"bakend": "eager"}, 2, TypeError, "unknown key 'bakend'; expected backend, mode"),
        ({"backend": "nothing"}, 2, ValueError, "{backend: 'nothing'}: Invalid backend"),
        ({"mode": "fastest"}, 2, ValueError, "mode=fastest"),
        ({"mode": "reduce-overhead"}, 3, ValueError, 'Use mode="max-autotune-no-cudagraphs"'),
        ({"options": {"triton.cudagraphs": True}}, 3, ValueError, "a stage from 0 to 2"),
    ],
)
def test_bad_arguments_are_refused_with_nothing_changed(
    compile: Any, stage: int, error: type[Exception], match: str
) -> None:
    model = make_net()
    with pytest.raises(error, match=match):
        shardcore.shard(model, adam(model), stage, compile=compile)
    assert "forward" not in vars(model.blocks[0])
    assert not hasattr(model, "_shardcore_engine")


def test_arguments_are_those_of_torch() -> None:
    assert compile_arguments("shard", False, sharded=True) is None
    assert compile_arguments("shard", True, sharded=True) == {}
    given = {"mode": "reduce-overhead", "dynamic": False}
    assert compile_arguments("shard", given, sharded=False) == given


def test_functions_are_compared_by_name() -> None:
    given = {"options": {"max_autotune": True, "pre_pass": make_net}, "backend": Graphs()}
    assert in_words(given) == "{backend: Graphs, options: {max_autotune: True, pre_pass: make_net}}"
    assert in_words(True) != in_words(False)
    assert in_words({"mode": "1"}) != in_words({"mode": 1})


def _other_arguments(rank: int, world_size: int, of_rank: list[Any]) -> str:
    model = make_net()
    try:
        shardcore.shard(model, adam(model), 2, compile=of_rank[rank])
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("of_rank", "match"),
    [
        ([False, {"backend": "eager"}], "compile"),
        ([{"backend": "eager"}, {"backend": "nothing"}], "nothing"),
    ],
)
def test_ranks_with_other_arguments_raise_together(of_rank: list[Any], match: str) -> None:
    messages = run_ranks(2, _other_arguments, of_rank)
    assert all(match in message for message in messages)
    assert "nothing was raised" not in messages


def test_a_model_without_blocks_is_warned_of() -> None:
    model = nn.Linear(2, 2)
    with logged() as said:
        shardcore.shard(model, adam(model), 2, compile={"backend": "eager"})
    (warning,) = said
    assert "compile has no effect" in warning
    assert "units=" in warning
