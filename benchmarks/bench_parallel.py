"""Time a training step with tensor, pipeline and sequence parallelism beside torch's and
DeepSpeed's, on CPU ranks over gloo.

Four ranks, two of them for data in every part, one thread each; a Llama of transformers with random
weights, float32:

    tensor    two slices. shardcore.tensor_parallel and shard, stages 2 and 3; torch's
              parallelize_module and fully_shard (weights kept after forward, or not), the same
              modules sliced; DeepSpeed's AutoTP, ZeRO stages 1 and 2
    pipeline  two stages of half the layers, 1F1B. shardcore.shard_pipeline, stages 2 and 3, and
              PipelineModule, stage 1; torch's pipelining with stages in DistributedDataParallel or
              fully_shard; DeepSpeed's PipelineModule, ZeRO stage 1, the most that it takes
    sequence  two halves of each sequence. enable_sequence_parallel and shard, stage 3; DeepSpeed's
              UlyssesSPAttentionHF, ZeRO stage 3; and both without it, shardcore 3 and FSDP2 with
              whole sequences on each of the four ranks

Peers step with torch's fused AdamW. torch's context_parallel is left out: it has CUDA's attention
kernels only, and raises NotImplementedError for the CPU's (2.13).

Each part runs in processes of its own, since DeepSpeed keeps its groups in globals. First all
engines take a few steps, whose losses must be those of the model in one piece with torch's AdamW on
the whole batch: ours otherwise stop the run, a peer is left out by name. Then they take turns, a
step each, in a random order that the ranks share. A turn starts at a barrier and counts as long as
its slowest rank; what counts is the ratio to ours within a round.

kept, peak: bytes between steps, and at most in one, activations included, on the rank that has most
(cpu_buffers.counted); gloo's own are not in it. Ours keep gradient shards and the buffers of
exchanges, which peers allocate in each step: compare peaks. DeepSpeed's reduce_bucket_size is 8 Mi
elements instead of 500 million, of which ZeRO would keep two buffers.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import shardcore
from benchmarks import harness, suite
from benchmarks.bench_train_step import (
    DEEPSPEED,
    OPTIONS,
    check_losses,
    ddp,
    deepspeed_config,
    slowest,
)
from benchmarks.cpu_buffers import counted
from examples.launch import Rank, launch
from examples.training import gather
from shardcore.integrations.sequence_attention import enable_sequence_parallel

LLAMA = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# sizes of Llama, sequences of a rank for data, tokens of a sequence, micro-batches of a pipeline
SIZES = {
    "cpu28m": (LLAMA, 4, 128, 4),
    "tiny": (TINY, 4, 16, 2),
}
RANKS, SPLIT = 4, 2
CHECKED_STEPS = 3
OP = "bench_parallel"

# sequences of this rank's "dp" place -> loss, on ranks that have one
Step = Callable[[torch.Tensor], torch.Tensor | None]
Maker = Callable[[], Step]


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens, as transformers' models take it from labels."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(backward: Step, optimizer: Any) -> Step:
    """Return a step of an optimizer as every torch program writes it, around what ends with a
    backward.
    """

    def step(tokens: torch.Tensor) -> torch.Tensor | None:
        loss = backward(tokens)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def whole_backward(model: nn.Module) -> Step:
    def backward(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return backward


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, whose kernel wants weights of one list on one mesh."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        meshes.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return torch.optim.AdamW(
        [{"params": params} for params in meshes.values()], **OPTIONS, fused=True
    )


def sharded(model: nn.Module, stage: int, mesh: Any) -> tuple[Any, Any]:
    return shardcore.shard(
        model, shardcore.FusedAdam(model.parameters(), **OPTIONS), stage=stage, process_group=mesh
    )


def fsdp2(model: nn.Module, blocks: Any, stage: int, mesh: Any) -> nn.Module:
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3 and module is not model)
    return model


def deepspeed_engine(
    model: nn.Module, stage: int, batch: int, more: dict[str, object], **given: Any
) -> Any:
    import deepspeed

    return initialized(deepspeed, model, stage, batch, more, **given)


def initialized(
    package: Any, model: nn.Module, stage: int, batch: int, more: dict[str, object], **given: Any
) -> Any:
    """Return the engine of a configuration. package: deepspeed, or shardcore by its names."""
    config = deepspeed_config(stage, batch) | more
    config["zero_optimization"]["reduce_bucket_size"] = 2**23
    return package.initialize(model=model, optimizer=adamw(model), config=config, **given)[0]


# --- The parts: each returns what makes its engines, and the place of this rank among those of data


def tensor(model: LlamaForCausalLM, batch: int, *_: int) -> tuple[dict[str, Maker], int]:
    mesh = init_device_mesh("cpu", (RANKS // SPLIT, SPLIT), mesh_dim_names=("dp", "tp"))

    def ours(stage: int) -> Step:
        sliced = shardcore.tensor_parallel(copy.deepcopy(model), mesh["tp"])
        one, optimizer = sharded(sliced, stage, mesh["dp"])
        return trained(whole_backward(one), optimizer)

    def torchs(stage: int) -> Step:
        sliced, column, row = copy.deepcopy(model), ColwiseParallel(), RowwiseParallel()
        columns = {f"self_attn.{name}_proj": column for name in "qkv"} | {
            f"mlp.{name}_proj": column for name in ("gate", "up")
        }
        for layer in sliced.model.layers:
            parallelize_module(
                layer, mesh["tp"], columns | {"self_attn.o_proj": row, "mlp.down_proj": row}
            )
        parallelize_module(
            sliced, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        )
        one = fsdp2(sliced, sliced.model.layers, stage, mesh["dp"])
        return trained(whole_backward(one), adamw(one))

    def deepspeeds(stage: int) -> Step:
        parallel = {"tensor_parallel": {"autotp_size": SPLIT}}
        engine = deepspeed_engine(copy.deepcopy(model), stage, batch, parallel)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    makers: dict[str, Maker] = {
        f"shardcore {stage}": lambda stage=stage: ours(stage) for stage in (2, 3)
    }
    makers |= {f"FSDP2 {stage}": lambda stage=stage: torchs(stage) for stage in (2, 3)}
    makers |= {f"DeepSpeed {stage}": lambda stage=stage: deepspeeds(stage) for stage in (1, 2)}
    return makers, mesh["dp"].get_local_rank()


class Block(nn.Module):
    """A layer of Llama that makes its own rotary positions, so that stages pass one tensor."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        y: torch.Tensor = self.layer(x, position_embeddings=self.rotary(x, positions))
        return y


def pipeline(
    model: LlamaForCausalLM, batch: int, length: int, microbatches: int
) -> tuple[dict[str, Maker], int]:
    # DeepSpeed's order of ranks
    mesh = init_device_mesh("cpu", (SPLIT, RANKS // SPLIT), mesh_dim_names=("pp", "dp"))
    place, width, classes = (
        mesh["pp"].get_local_rank(),
        model.config.hidden_size,
        model.config.vocab_size,
    )

    def layers() -> list[nn.Module]:
        whole = copy.deepcopy(model)
        blocks = [Block(layer, whole.model.rotary_emb) for layer in whole.model.layers]
        return [whole.model.embed_tokens, *blocks, nn.Sequential(whole.model.norm, whole.lm_head)]

    def cut() -> nn.Sequential:
        all_layers = layers()
        half = len(all_layers) // SPLIT
        return nn.Sequential(*all_layers[place * half : (place + 1) * half])

    def one_stage(module: nn.Module) -> PipelineStage:
        # Told the shapes, torch does not look for them in a forward of its own, after which DDP
        # would reduce too early.
        tokens, hidden, logits = (
            torch.empty(batch // microbatches, length, *last) for last in ((), (width,), (classes,))
        )
        hidden, logits = hidden.requires_grad_(), logits.requires_grad_()
        shapes = {
            "input_args": (tokens.long(), hidden)[place],
            "output_args": (hidden, logits)[place],
        }
        return PipelineStage(
            module, place, SPLIT, torch.device("cpu"), group=mesh["pp"].get_group(), **shapes
        )

    def scheduled(stage: PipelineStage, optimizer: Any) -> Step:
        def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return cross_entropy(logits, tokens) / microbatches

        schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of, scale_grads=False)

        def backward(tokens: torch.Tensor) -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            if stage.is_first:
                schedule.step(tokens)
                return None
            schedule.step(target=tokens, losses=losses)
            return torch.stack(losses).sum().detach()

        return trained(backward, optimizer)

    def ours(stage: int) -> Step:
        module = cut()
        one, optimizer = one_stage(module), shardcore.FusedAdam(module.parameters(), **OPTIONS)
        _, optimizer = shardcore.shard_pipeline(
            one, optimizer, stage=stage, n_microbatches=microbatches, process_group=mesh["dp"]
        )
        return scheduled(one, optimizer)

    def torchs(wrap: Callable[[nn.Sequential], nn.Module]) -> Step:
        module = wrap(cut())
        return scheduled(one_stage(module), adamw(module))

    def of_layers(package: Any) -> Step:
        module = package.pipe.PipelineModule(
            layers(), num_stages=SPLIT, loss_fn=cross_entropy, partition_method="uniform"
        )
        more: dict[str, object] = {"gradient_accumulation_steps": microbatches}
        engine = initialized(package, module, 1, batch // microbatches, more)

        def step(tokens: torch.Tensor) -> torch.Tensor | None:
            loss = engine.train_batch(iter([(part, part) for part in tokens.chunk(microbatches)]))
            return loss.detach().clone()

        return step

    def deepspeeds() -> Step:
        import deepspeed

        return of_layers(deepspeed)

    makers: dict[str, Maker] = {
        f"shardcore {stage}": lambda stage=stage: ours(stage) for stage in (2, 3)
    }
    makers["shardcore 1, PipelineModule"] = lambda: of_layers(shardcore)
    makers["DDP"] = lambda: torchs(lambda module: ddp(module, mesh["dp"].get_group()))
    for stage in (2, 3):
        makers[f"FSDP2 {stage}"] = lambda stage=stage: torchs(
            lambda module: fsdp2(module, module, stage, mesh["dp"])
        )
    makers["DeepSpeed 1"] = deepspeeds
    return makers, mesh["dp"].get_local_rank()


def sequence(model: LlamaForCausalLM, batch: int, *_: int) -> tuple[dict[str, Maker], int]:
    mesh = init_device_mesh("cpu", (RANKS // SPLIT, SPLIT), mesh_dim_names=("dp", "sp"))
    world = init_device_mesh("cpu", (RANKS,))

    def parts(tokens: torch.Tensor) -> dict[str, Any]:
        return shardcore.split_sequences({"input_ids": tokens, "labels": tokens}, mesh["sp"])

    def own(step: Step) -> Step:
        """Give each rank whole sequences of its own."""
        return lambda tokens: step(tokens.chunk(SPLIT)[mesh["sp"].get_local_rank()])

    def ours(stage: int) -> Step:
        one = copy.deepcopy(model)
        enable_sequence_parallel(one, mesh["sp"])
        one, optimizer = sharded(one, stage, None)

        def backward(tokens: torch.Tensor) -> torch.Tensor:
            loss = one(**parts(tokens)).loss
            loss.backward()
            return loss.detach()

        return trained(backward, optimizer)

    def deepspeeds() -> Step:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        one = copy.deepcopy(model)
        mpu = UlyssesSPAttentionHF.register_with_transformers(one, "sdpa", SPLIT, batch)
        # of every model in the process, so it goes where others take their turns
        theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        engine = deepspeed_engine(one, 3, batch, {"sequence_parallel_size": SPLIT}, mpu=mpu)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            part = parts(tokens)
            ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
            logits = engine(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
            del ALL_ATTENTION_FUNCTIONS["sdpa"]
            loss = (
                F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
                / part["num_items_in_batch"]
            )
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    def ours_whole() -> Step:
        one, optimizer = sharded(copy.deepcopy(model), 3, None)
        return own(trained(whole_backward(one), optimizer))

    def torchs_whole() -> Step:
        one = copy.deepcopy(model)
        fsdp2(one, one.model.layers, 3, world)
        return own(trained(whole_backward(one), adamw(one)))

    makers: dict[str, Maker] = {"shardcore 3": lambda: ours(3)}
    makers |= {
        "shardcore 3, whole": ours_whole,
        "FSDP2 3, whole": torchs_whole,
        "DeepSpeed 3": deepspeeds,
    }
    return makers, mesh["dp"].get_local_rank()


PARTS = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence}


# --- Measuring ------------------------------------------------------------------------------------


def averaged(losses: dict[str, list[torch.Tensor | None]]) -> dict[str, list[float]]:
    """Return each step's mean over the ranks that have a loss, by engine. Collective."""
    of_ranks = gather(
        {
            name: [None if loss is None else loss.item() for loss in own]
            for name, own in losses.items()
        }
    )
    return {
        name: [
            statistics.fmean(loss for loss in at if loss is not None)
            for at in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)
        ]
        for name in losses
    }


def run_rank(rank: Rank, options: argparse.Namespace, part: str, folder: str) -> int:
    """Measure a part on every rank; rank 0 reports, and writes it into the folder."""
    sizes, batch, length, microbatches = SIZES[options.preset]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"] // 2, use_cache=False)
    )
    if "DeepSpeed" in options.peers:
        import deepspeed

        deepspeed.init_distributed()
    makers, place = PARTS[part](model, batch, length, microbatches)
    makers = {
        name: make
        for name, make in makers.items()
        if name.startswith(("shardcore", *options.peers))
    }

    def tokens_of(step: int) -> torch.Tensor:
        seeded = torch.Generator().manual_seed(step)
        return torch.randint(sizes["vocab_size"], (RANKS // SPLIT, batch, length), generator=seeded)

    losses: dict[str, list[Any]] = {"one piece": [None] * CHECKED_STEPS}
    if rank.rank == 0:
        one = copy.deepcopy(model)
        reference = trained(whole_backward(one), adamw(one))
        losses["one piece"] = [
            reference(tokens_of(step).flatten(0, 1)) for step in range(CHECKED_STEPS)
        ]
        del one, reference
    steps: dict[str, Step] = {}
    own_bytes: dict[str, list[int]] = {}
    for name, make in makers.items():
        losses[name], own_bytes[name] = [], []
        with counted(own_bytes[name]) as mark:
            steps[name] = make()
            for step in range(CHECKED_STEPS):
                if step == CHECKED_STEPS - 1:
                    mark()
                losses[name].append(steps[name](tokens_of(step)[place]))
    worst, others = check_losses(averaged(losses), "one piece", op=OP)
    del losses["one piece"], worst["one piece"]
    base = next(iter(worst))

    def case(name: str) -> Callable[[], None]:
        return lambda: losses[name].append(steps[name](tokens_of(len(losses[name]))[place]))

    def timer(call: Callable[[], None], repeats: int) -> float:
        dist.barrier()
        return harness.wall_seconds(call, repeats)

    cases = {name: case(name) for name in worst}
    seconds = slowest(harness.interleave(cases, options.rounds, pause_s=options.pause, timer=timer))
    # of the timed steps, too
    others |= check_losses(averaged({name: losses[name] for name in worst}), base, op=OP)[1]
    bytes_of_ranks = gather(own_bytes)
    if rank.rank > 0:
        return 0
    rows = [
        [
            part,
            "ms (median)",
            f"time / {base} [quartiles]",
            "kept, MiB",
            "peak, MiB",
            "losses within",
        ]
    ]
    engines = {}
    for name in [name for name in worst if name not in others]:
        ratio = harness.paired(seconds[name], seconds[base])
        kept, peak = (
            max(counts)
            for counts in zip(*(of_rank[name] for of_rank in bytes_of_ranks), strict=True)
        )
        memory = [f"{count / 2**20:.0f}" for count in (kept, peak)]
        rows.append(
            [
                name,
                f"{harness.spread(seconds[name]).median * 1e3:.0f}",
                str(ratio),
                *memory,
                f"{worst[name]:.1e}",
            ]
        )
        figures = {
            "time_over_base": asdict(ratio),
            "kept_bytes": kept,
            "peak_bytes": peak,
            "losses_within": worst[name],
        }
        engines[name] = {"seconds": seconds[name], **figures}
    print(
        f"\n{options.preset}, {RANKS} ranks, {RANKS // SPLIT} batches of {batch} x {length} "
        f"tokens, {options.rounds} rounds"
    )
    print(harness.table(rows))
    for name, difference in others.items():
        print(
            f"{name} is left out: its losses differ by {difference:.1e} (it trains something else)"
        )
    harness.save_json(
        Path(folder, f"{part}.json"), {"base": base, "engines": engines, "left_out": others}
    )
    return 0


def main() -> int:
    """Run, print tables, write parallel.json into --out."""
    parser = suite.make_parser("parallel", str(__doc__), rounds=9, pause=0.05)
    parser.add_argument(
        "--preset",
        choices=list(SIZES),
        default="cpu28m",
        help="model and batch (default: %(default)s)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="which to time (default: all)",
    )
    peers = ["DDP", "FSDP2", "DeepSpeed"]
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=peers,
        default=peers,
        help="beside shardcore (default: all here)",
    )
    options = suite.parse(parser)
    # the ranks inherit these
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="5")
    if DEEPSPEED is None:
        options.peers = [peer for peer in options.peers if peer != "DeepSpeed"]
        print(
            "DeepSpeed is left out: deepspeed is not installed (pip install --no-build-isolation "
            "deepspeed)"
        )
    result = suite.about_run("parallel", options)
    result["deepspeed"] = DEEPSPEED
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            status = launch(run_rank, RANKS, "cpu", 1, options, part, folder)
            if status:
                return status
            result[part] = json.loads(Path(folder, f"{part}.json").read_text())
    harness.write_json(options.out / "parallel.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
