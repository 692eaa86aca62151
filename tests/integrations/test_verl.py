"""verl's engine on shardcore, over two ranks without Ray: the losses, norms, weights and names of
verl's own FSDP engine; weights for rollouts, phases, checkpoints, configurations.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("verl", reason="verl is not installed")

import shardcore
from tests.support.language_models import tiny_mixtral
from tests.support.ranks import run_ranks
from tests.support.verl import (
    ROWS,
    batch,
    configurations,
    engine_of,
    of_values,
    save_qwen,
    sft,
    train,
    use_cpu,
    use_packed_attention,
    weights_of,
)

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
PACKED = {"override_config": {"attn_implementation": "packed"}}
PARAMS = {"param_offload": True}
BOTH = {"param_offload": True, "optimizer_offload": True}
LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen")
    save_qwen(path)
    return str(path)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def on_a_gpu(rank: int, world_size: int, function: Any, *args: Any) -> Any:
    """Call it as if the device were a GPU, from which weights and states can be moved."""
    with (
        patch("shardcore.integrations.verl.get_device_name", lambda: "cuda"),
        patch("verl.workers.engine.base.get_device_name", lambda: "cuda"),
    ):
        return function(rank, world_size, *args)


# --- training ---------------------------------------------------------------------------------


def trained(rank: int, world_size: int, folder: str, kind: str, loss: Any, *runs: Any) -> Any:
    """The losses, norms and weights of runs of (backend, options, settings of batches)."""
    results = []
    for backend, options, settings in runs:
        engine = engine_of(folder, backend, kind, **options)
        results.append((train(engine, loss, **settings), weights_of(engine)))
        del engine
    return results


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_engine_trains_as_verls_fsdp_engine(folder: str, kind: str) -> None:
    loss = sft() if kind == "language_model" else of_values
    runs = [
        ("fsdp2", {"mixed_precision": FP32}, {}),
        ("shardcore", {"precision": "fp32"}, {"use_remove_padding": True}),
        (
            "shardcore",
            {
                "precision": "fp32",
                "stage": 1,
                "use_no_sync_for_gradient_accumulation": True,
                "optim": {"optimizer_impl": "shardcore", "optimizer": "FusedAdam"},
            },
            {},
        ),
        ("shardcore", {"precision": "fp32"}, {"micro_batch_size_per_gpu": 4}),
    ]
    for verls, *ours in run_ranks(2, trained, folder, kind, loss, *runs):
        for (results, weights), same_parts in zip(ours, [True, True, False], strict=True):
            for (losses, norm), (verls_losses, verls_norm) in zip(results, verls[0], strict=True):
                assert norm == pytest.approx(verls_norm, rel=1e-5)
                assert sum(losses) == pytest.approx(sum(verls_losses), rel=1e-5)
                assert (len(losses) == len(verls_losses)) is same_parts
            assert largest_difference(weights, verls[1]) < 1e-5  # steps move weights by 1e-2


def long_sequences(rank: int, world_size: int, folder: str, *runs: Any) -> Any:
    """The losses, norms and weights of runs of (backend, options) with the attention that verl's
    Ulysses wraps, and the rank's place among those with other sequences.
    """
    results = []
    use_packed_attention()
    for backend, options in runs:
        engine = engine_of(folder, backend, model=PACKED, **options)
        results.append((train(engine, sft(), use_remove_padding=True), weights_of(engine)))
    for _, _, spec in engine.get_per_tensor_param_shard()[0]:  # shards are over all ranks
        assert dist.get_world_size(spec.gather_group) == world_size
    return results, engine.get_data_parallel_rank()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ulysses_trains_as_verls_fsdp_engine(folder: str, world_size: int) -> None:
    halves = {"ulysses_sequence_parallel_size": 2}
    runs = [
        ("fsdp2", {"mixed_precision": FP32, **halves}),
        ("shardcore", {"precision": "fp32", **halves}),
    ]
    whole = [("shardcore", {"precision": "fp32"})]
    sequences_whole = run_ranks(world_size // 2, long_sequences, folder, *whole)
    for rank, ((verls, ours), place) in enumerate(
        run_ranks(world_size, long_sequences, folder, *runs)
    ):
        assert place == rank // 2
        for (losses, norm), (verls_losses, verls_norm), (whole_losses, whole_norm) in zip(
            ours[0], verls[0], sequences_whole[place][0][0][0], strict=True
        ):
            assert losses == pytest.approx(verls_losses, rel=1e-5)
            assert losses == pytest.approx(whole_losses, rel=1e-5)
            if rank % 2 == 0:  # verl reports the norm on the first rank of each sequence
                assert norm == pytest.approx(verls_norm, rel=1e-5)
                assert norm == pytest.approx(whole_norm, rel=1e-5)
        assert largest_difference(ours[1], verls[1]) < 1e-5
        assert largest_difference(ours[1], sequences_whole[place][0][0][1]) < 1e-5


def with_bf16(rank: int, world_size: int, folder: str) -> Any:
    """What 16-bit engines train to: FSDP's and ours in bfloat16, ours in float16; a reference."""
    runs = [
        ("fsdp2", {}, {}),
        ("shardcore", {}, {}),
    ]
    results = trained(rank, world_size, folder, "language_model", sft(), *runs)
    with_scale = train(engine_of(folder, precision="fp16"), sft(), range(6))
    engine = engine_of(folder)
    dtypes = {weight.dtype for _, weight in engine.get_per_tensor_param()[0]}
    reference = engine_of(folder, forward_only=True, offload={"params": "cpu"})
    outputs = []
    for each in (engine, reference):
        with each.eval_mode():
            output = each.infer_batch(batch(0, rank))
            outputs.append(output["model_output"]["log_probs"].values())
    return results, with_scale, dtypes, torch.equal(*outputs), reference.optimizer


def test_16_bit_weights(folder: str) -> None:
    for (verls, ours), with_scale, dtypes, same, optimizer in run_ranks(2, with_bf16, folder):
        for (losses, norm), (verls_losses, verls_norm) in zip(ours[0], verls[0], strict=True):
            assert losses == pytest.approx(verls_losses, rel=5e-3)
            assert norm == pytest.approx(verls_norm, rel=2e-2)
        assert with_scale[0][0] == pytest.approx(verls[0][0][0], rel=5e-3)
        norms = [norm for _, norm in with_scale]
        assert not math.isfinite(norms[0])  # an overflow at the first scale skips the step
        assert math.isfinite(norms[-1])
        assert dtypes == {torch.bfloat16}
        assert same  # a reference model computes as the actor does before its first step
        assert optimizer is None


def in_verls_worker(rank: int, world_size: int, folder: str) -> Any:
    """What verl's worker of an actor returns: metrics of two steps, and the names of outputs."""
    use_cpu()
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": str(rank)}
    sizes = {"max_token_len_per_gpu": 24, "infer_max_token_len_per_gpu": 24}
    with patch.dict(os.environ, {**ranks, **master, "LOCAL_WORLD_SIZE": str(world_size)}):
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        worker = TrainingWorker(
            TrainingWorkerConfig(**configurations(folder, **sizes, optimizer_offload=True))
        )
        worker.reset()
        worker.flops_counter = None  # it asks for the name of a GPU
        worker.set_loss_fn(sft())
        outputs = []
        for step in (0, 1, 2):
            data = batch(step, rank)
            tu.assign_non_tensor(data, global_token_num=[8] * ROWS, update_lr_scheduler=True)
            tu.pop_keys(data, ["use_dynamic_bsz", "use_remove_padding", "micro_batch_size_per_gpu"])
            outputs.append(worker.infer_batch(data) if step == 2 else worker.train_batch(data))
    norms = [tu.get(output, "metrics")["grad_norm"] for output in outputs[:2]]
    return norms, sorted(outputs[2].keys())


def test_verls_worker_trains_batches_of_any_length(folder: str) -> None:
    for norms, outputs in run_ranks(2, in_verls_worker, folder):
        assert all(0.1 < norm < 10 for norm in norms)
        assert outputs == ["entropy", "log_probs", "metrics"]


# --- weights for rollouts ---------------------------------------------------------------------


def lora_weights(rank: int, world_size: int, folder: str, backend: str, options: Any) -> Any:
    """What rollouts get of a model with adapters after two steps: adapters, base, merged."""
    torch.manual_seed(3)
    engine = engine_of(folder, backend, model=LORA, **options)
    train(engine, sft(), range(2), micro_batch_size_per_gpu=4)
    adapters, config = engine.get_per_tensor_param(base_sync_done=True)
    parts = [{name: value.clone() for name, value in adapters}]
    base, base_config = engine.get_per_tensor_param(base_sync_done=False)
    parts.append({name: value.clone() for name, value in base})
    engine.model_config.lora["merge"] = True
    merged, none = engine.get_per_tensor_param(base_sync_done=True)
    parts.append({name: value.float() for name, value in merged})
    with engine.disable_adapter(), engine.eval_mode():
        without = engine.infer_batch(batch(5, rank))["model_output"]["log_probs"].values()
    return parts, config, base_config, none, without


def test_adapters_and_their_base(folder: str) -> None:
    options = {"precision": "fp32", **PARAMS}
    verls, *more = run_ranks(2, lora_weights, folder, "fsdp2", {"mixed_precision": FP32})[1]
    ours, *more_of_ours = run_ranks(2, on_a_gpu, lora_weights, folder, "shardcore", options)[1]
    assert more_of_ours[0]["r"] == LORA["lora_rank"]
    assert more_of_ours[:3] == more[:3]
    assert torch.allclose(more_of_ours[3], more[3], atol=1e-5)
    for part, of_verl, bound in zip(ours, verls, [1e-5, 1e-6, 1e-2], strict=True):  # merged: bf16
        assert largest_difference(part, of_verl) < bound
    moved = max(float(value.abs().max()) for name, value in ours[0].items() if "lora_B" in name)
    assert moved > 1e-3


def parts_and_changes(rank: int, world_size: int, folder: str, stage: int) -> Any:
    """How far the parts of all ranks, and the changes of a step, are from the streamed weights."""
    engine = engine_of(folder, stage=stage)
    held: dict[str, torch.Tensor] = {n: w.clone() for n, w in engine.get_per_tensor_param()[0]}
    engine.prime_delta_snapshots()
    mine = [(n, p, s.place, s.full_shape) for n, p, s in engine.get_per_tensor_param_shard()[0]]
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, mine)
    assert [[each[0] for each in one] for one in everyones] == [[*held]] * world_size
    counts = []
    for of_ranks in zip(*everyones, strict=True):
        name, _, _, shape = of_ranks[0]
        whole = torch.full((held[name].numel(),), torch.nan, dtype=held[name].dtype)
        for _, part, place, _ in of_ranks:
            whole[place : place + part.numel()] = part
        assert torch.equal(whole.view(shape), held[name])
        counts.append(sum(part.numel() for _, part, *_ in of_ranks) == whole.numel())
    train(engine, sft(), range(2))  # the first has a rate of 0
    changes = [
        (slots[0][0], index, value)
        for slots, dtype, count, index, value, group in engine.get_per_tensor_param_delta_shard()[0]
    ]
    dist.all_gather_object(everyones, changes)
    number = 0
    for name, index, value in (change for one in everyones for change in one):
        held[name].view(-1)[index.long()] = value
        number += len(index)
    now = dict(engine.get_per_tensor_param()[0])
    return all(counts), number, all(torch.equal(held[name], now[name]) for name in now)


@pytest.mark.parametrize("stage", [0, 3])
def test_parts_and_their_changes_are_the_streamed_weights(folder: str, stage: int) -> None:
    for disjoint, changed, same in run_ranks(2, parts_and_changes, folder, stage):
        assert disjoint
        assert changed > 1000
        assert same


def split_experts(rank: int, world_size: int, folder: str) -> Any:
    """The names that a rollout gets of a model with packed experts; how parts are refused, and how
    settings.
    """
    engine = engine_of(folder)
    names = [name for name, _ in engine.get_per_tensor_param()[0]]
    messages = []
    for error, call in [
        (NotImplementedError, engine.get_per_tensor_param_shard),
        (ValueError, lambda: engine.save_checkpoint("here", "hdfs://there")),
        (ValueError, lambda: engine_of(folder, checkpoint={"async_save": True})),
        (ValueError, lambda: engine_of(folder, model={"enable_activation_offload": True})),
    ]:
        with pytest.raises(error) as raised:
            call()
        messages.append(str(raised.value))
    return names, messages


def test_experts_are_split_for_rollouts_and_refused_in_parts(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tiny_mixtral().save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        in_file = set(file.keys())
    for names, messages in run_ranks(2, split_experts, str(tmp_path)):
        assert set(names) == in_file
        assert "such as one tensor for each expert; expected the same layout" in messages[0]
        assert messages[1:] == [
            "hdfs_path is 'hdfs://there'; expected None",
            "checkpoint.async_save is True; expected False",
            "model.enable_activation_offload is True; expected False",
        ]


# --- phases and checkpoints -------------------------------------------------------------------


def on_device(engine: Any) -> tuple[int, int]:
    """The bytes of weights, and of all else, that memory_report finds on the device."""
    report = shardcore.memory_report(engine.module)
    here = [line for line in report.lines if line.tier == "device"]
    weights = sum(line.bytes for line in here if line.kind == "weights")
    return weights, sum(line.bytes for line in here) - weights


def phases(rank: int, world_size: int, folder: str, options: Any, out: str) -> Any:
    """Two steps as verl's worker runs them, with log probabilities, streams and saves between
    them. Returns their results, the weights, and the bytes on the device at each place.
    """
    engine = engine_of(folder, **options)
    seen, results = {"at first": on_device(engine)}, []
    for step in range(2):
        with engine.eval_mode():
            seen["eval"] = on_device(engine)
            output = engine.infer_batch(batch(step, rank))
            results.append(output["model_output"]["log_probs"].values().tolist())
        seen["between"] = on_device(engine)
        results.append(train(engine, sft(), range(step, step + 1)))
        first, second = engine.get_per_tensor_param()[0], engine.get_per_tensor_param()[0]
        streamed = {name: weight.float().clone() for name, weight in second}
        seen["streamed"] = on_device(engine)
        next(first)
        seen["in the stream"] = on_device(engine)
        assert sum(1 for _ in first) == len(streamed) - 1
        assert sum(1 for _ in engine.get_per_tensor_param_shard()[0]) == len(streamed)
        engine.save_checkpoint(f"{out}/{step}")
        seen["saved"] = on_device(engine)
    if options:
        with pytest.raises(ValueError, match="in host memory since"):
            engine.optimizer.step()
    engine.load_checkpoint(f"{out}/0")
    seen["loaded"] = on_device(engine)
    results.append(train(engine, sft(), range(1, 2)))
    return results, weights_of(engine), seen


@pytest.mark.parametrize("options", [{"optimizer_offload": True}, PARAMS, BOTH])
def test_weights_and_states_leave_the_device_between_phases(
    folder: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    straight = run_ranks(2, phases, folder, {}, str(tmp_path / "straight"))
    away = run_ranks(2, on_a_gpu, phases, folder, options, str(tmp_path / "away"))
    for (results, weights, seen), (others, same, kept) in zip(away, straight, strict=True):
        size = kept["at first"][0]
        assert results == others
        assert largest_difference(weights, same) == 0
        for place in ("at first", "between", "streamed", "saved", "loaded"):
            assert (seen[place][0] == 0) is ("param_offload" in options), place
            assert seen[place][1] == 0, place
        for place in ("eval", "in the stream"):
            assert seen[place][0] >= size, place  # and gathered ones
            assert (seen[place][1] == 0) is ("optimizer_offload" in options), place


def of_a_reference(rank: int, world_size: int, folder: str, options: Any) -> Any:
    """The log probabilities of a reference model, twice; what was on the device between them."""
    engine = engine_of(folder, forward_only=True, **options)
    results, seen = [], [on_device(engine)]
    for step in range(2):
        with engine.eval_mode():
            output = engine.infer_batch(batch(step, rank))
        results.append(output["model_output"]["log_probs"].values().tolist())
        seen.append(on_device(engine))
    return results, seen


def test_a_reference_model_leaves_the_device(folder: str) -> None:
    straight = run_ranks(2, of_a_reference, folder, {})
    away = run_ranks(2, on_a_gpu, of_a_reference, folder, PARAMS)
    for (results, seen), (others, stays) in zip(away, straight, strict=True):
        assert results == others
        assert seen == [(0, 0)] * 3
        assert all(weights > 0 for weights, _ in stays)


def with_gradients(rank: int, world_size: int, folder: str, options: Any) -> Any:
    """Two steps whose gradients wait while verl switches modes between backward and step."""
    engine = engine_of(folder, **options)
    for step in range(2):
        with engine.train_mode(zero_grad_on_exit=False):
            engine.forward_backward_batch(batch(step, rank), sft())
        with engine.train_mode():
            norm = engine.optimizer_step()
            engine.lr_scheduler_step()
    return norm, weights_of(engine), on_device(engine)


def test_weights_stay_while_gradients_wait(folder: str) -> None:
    straight = run_ranks(2, with_gradients, folder, {})
    away = run_ranks(2, on_a_gpu, with_gradients, folder, BOTH)
    for (norm, weights, left), (norm_again, same, _) in zip(away, straight, strict=True):
        assert norm == norm_again
        assert largest_difference(weights, same) == 0
        assert left == (0, 0)


def saved(rank: int, world_size: int, folder: str, out: str) -> Any:
    """Save three times, keep two; return the weights two steps after the last save."""
    engine = engine_of(
        folder, checkpoint={"save_contents": ["model", "optimizer", "extra", "hf_model"]}
    )
    for step in range(3):
        train(engine, sft(), range(step, step + 1))
        engine.save_checkpoint(f"{out}/global_step_{step}/actor", None, step, 2)
    weights = weights_of(engine)
    train(engine, sft(), range(3, 5))
    return weights, weights_of(engine), engine.lr_scheduler.state_dict()


def resumed(rank: int, world_size: int, folder: str, out: str) -> Any:
    engine = engine_of(folder, stage=1, optimizer_offload=True)
    engine.load_checkpoint(f"{out}/global_step_2/actor")
    weights = weights_of(engine)
    train(engine, sft(), range(3, 5))
    return weights, weights_of(engine), engine.lr_scheduler.state_dict()


def test_checkpoints_resume_to_the_bits(folder: str, tmp_path: Path) -> None:
    import transformers

    before = run_ranks(2, saved, folder, str(tmp_path))
    after = run_ranks(2, resumed, folder, str(tmp_path))
    for (at, end, schedule), (loaded, end_again, schedule_again) in zip(before, after, strict=True):
        assert largest_difference(at, loaded) == 0
        assert largest_difference(end, end_again) == 0
        assert schedule == schedule_again
    assert sorted(os.listdir(tmp_path)) == ["global_step_0", "global_step_1", "global_step_2"]
    assert not (tmp_path / "global_step_0/actor").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "global_step_2/actor/huggingface"
    )
    assert (
        largest_difference({n: p.float() for n, p in model.named_parameters()}, before[0][0]) == 0
    )


def adapters_saved(rank: int, world_size: int, folder: str, out: str) -> float:
    """How far a resumed run is from the one that saved its adapters alone."""
    options = {"model": LORA, "checkpoint": {"save_lora_only": True}}
    engine = engine_of(folder, **options)
    train(engine, sft(), range(2))
    engine.save_checkpoint(out)
    new = engine_of(folder, **options)
    new.load_checkpoint(out)
    results = []
    for each in (engine, new):
        train(each, sft(), range(2, 3))
        results.append(dict(each.get_per_tensor_param(base_sync_done=True)[0]))
    return largest_difference(*results)


def test_checkpoints_of_adapters_alone(folder: str, tmp_path: Path) -> None:
    assert run_ranks(2, adapters_saved, folder, str(tmp_path / "adapters")) == [0, 0]


# --- configurations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "bf8"}, "precision is 'bf8'; expected one of"),
        ({"dtype": "float16"}, r"dtype is 'float16'; expected 'bfloat16' \(set precision\)"),
        ({"strategy": "fsdp"}, "strategy is 'fsdp'; expected 'shardcore'"),
    ],
)
def test_configuration_names_what_is_not_supported(given: dict[str, Any], message: str) -> None:
    from shardcore.integrations.verl import ShardcoreEngineConfig

    with pytest.raises(ValueError, match=message):
        ShardcoreEngineConfig(**given)


def composed(trainer: str, *overrides: str) -> Any:
    """The configuration that a command of verl runs with."""
    from omegaconf import OmegaConf

    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "shardcore.integrations.verl"}
    command = ["-W", "ignore", "-m", f"verl.trainer.{trainer}", "--cfg", "job", "--resolve"]
    ran = subprocess.run(
        [sys.executable, *command, *overrides],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return OmegaConf.create(ran.stdout)


def test_verls_command_line_configures_all_roles() -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(
        "main_ppo",
        "model_engine=shardcore",
        "actor_rollout_ref.actor.shardcore.stage=2",
        "actor_rollout_ref.actor.shardcore.offload={optimizer: cpu}",
        "actor_rollout_ref.actor.shardcore.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.shardcore.param_offload=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "critic.shardcore.precision=fp32",
        "critic.ppo_micro_batch_size_per_gpu=1",
    )
    actor, ref, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    del critic.model  # it reads files
    for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
        ref[f"ppo_{name}"] = ref.pop(f"log_prob_{name}")  # as verl's worker does
    ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz")
    ref.ppo_mini_batch_size = actor.ppo_mini_batch_size
    engines = [omega_conf_to_dataclass(role).engine for role in (actor, ref, critic)]
    engines.append(omega_conf_to_dataclass(composed("sft_trainer", "engine=shardcore").engine))
    for role in (actor, ref, critic):
        assert role.strategy == "shardcore"
    assert [
        (
            each.strategy,
            each.stage,
            each.offload,
            each.precision,
            each.param_offload,
            each.forward_only,
            each.ulysses_sequence_parallel_size,
        )
        for each in engines
    ] == [
        ("shardcore", 2, {"optimizer": "cpu"}, "bf16", False, False, 2),
        ("shardcore", 3, None, "bf16", True, True, 2),  # sequences are shared as the actor's are
        ("shardcore", 3, None, "fp32", False, False, 1),
        ("shardcore", 3, None, "bf16", False, False, 1),
    ]
    assert all(type(each).__name__ == "ShardcoreEngineConfig" for each in engines)
