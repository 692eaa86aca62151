"""Time loading and sharding a pretrained model, and measure its host memory, beside DeepSpeed's and
FSDP2's, on two CPU ranks over gloo.

A Llama of 4 GB in bfloat16 (--gb), in .safetensors files of 1 GB with random values. PEFT's LoRA is
added, and the base is frozen. Every case shards both, and trains a step:

    shardcore 3            from_pretrained under HfDeepSpeedConfig with stage 3, then
                           shardcore.initialize
    deepspeed 3            the same with deepspeed.initialize
    fsdp2, rank 0 reads    the model on the meta device, fully_shard, then set_model_state_dict of
                           rank 0's whole state dict, broadcast
    fsdp2, dcp             the model on the meta device, fully_shard, then
                           torch.distributed.checkpoint's HuggingFaceStorageReader: each rank reads
                           its shards

Each case runs in processes of its own. peak: by how much the anonymous memory (RssAnon) of a rank
grows from the end of its imports to the end of loading, at most, sampled every few milliseconds.
Pages of mapped files are not in it: the kernel takes these back. bound: what shardcore promises: a
rank's shard, two units and 1 GiB. bytes_read: what all ranks read from files, as shardcore's reader
counts it, over the files' size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, suite

RANKS = 2
FILE_BYTES = 1 << 30
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": 512,
}
ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def config_of(gb: float) -> Any:
    """Return the configuration of a Llama of about this many GB in bfloat16."""
    from transformers import LlamaConfig

    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    block = 4 * hidden**2 + 3 * hidden * inner
    rest = 2 * SHAPE["vocab_size"] * hidden
    layers = max(1, round((gb * 1e9 / 2 - rest) / block))
    return LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **SHAPE)


def write_model(folder: Path, gb: float) -> int:
    """Write the model in files of about FILE_BYTES, one at a time; returns their bytes."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    config = config_of(gb)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        params = dict(LlamaForCausalLM(config).to(torch.bfloat16).named_parameters())
    split = split_torch_state_dict_into_shards(params, max_shard_size=FILE_BYTES)
    generator = torch.Generator().manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        values = {
            name: torch.randn(params[name].shape, generator=generator).mul_(0.02).bfloat16()
            for name in names
        }
        save_file(values, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


# --- in a rank ------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


@contextmanager
def peak_of(found: dict[str, int]) -> Iterator[None]:
    """Set found["peak_bytes"] to the largest growth of anonymous memory inside the context."""
    before, done = anonymous_bytes(), threading.Event()
    highest = before

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.003):
            highest = max(highest, anonymous_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield
    finally:
        done.set()
        sampler.join()
        found["peak_bytes"] = max(highest, anonymous_bytes()) - before


def with_adapters(model: nn.Module) -> nn.Module:
    """Add LoRA to the attention of a Llama, and freeze the rest."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, lora)  # type: ignore[arg-type]
    return adapted


def on_meta(folder: Path) -> nn.Module:
    """Return the model with adapters, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return with_adapters(model.to(torch.bfloat16))


Loaded = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], None]]


def by_deepspeeds_api(folder: Path) -> Loaded:
    """Load as scripts for DeepSpeed do, by the package that is imported as deepspeed."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    kept = HfDeepSpeedConfig(ZERO_3)  # transformers refers to it weakly
    model = with_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=ZERO_3)
    del kept

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return lambda ids: engine(input_ids=ids, labels=ids).loss, step


def by_fsdp2(folder: Path, rank_0_reads: bool) -> Loaded:
    """Load by fully_shard, from a state dict on rank 0 or by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    model: Any = on_meta(folder)
    for block in model.get_base_model().model.layers:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    name_of = {name: _name_in_files(name) for name in model.state_dict()}
    if rank_0_reads:
        values: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            stored = {
                key: tensor
                for path in sorted(folder.glob("*.safetensors"))
                for key, tensor in load_file(path).items()
            }
            values = {name: stored[key] for name, key in name_of.items() if key in stored}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, values, options=options)
    else:
        weights = {
            name_of[name]: tensor
            for name, tensor in model.state_dict().items()
            if "lora_" not in name
        }
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", True)
    # buffers of rotary embeddings are in no file
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            model.get_base_model()._init_weights(module)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return lambda ids: model(input_ids=ids, labels=ids).loss, step


def _name_in_files(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def run_rank(case: str, folder: Path) -> None:
    """Load and train a step in this process; rank 0 prints the result as JSON."""
    found: dict[str, Any] = {"bytes_read": 0}
    if case == "shardcore 3":
        from shardcore.deepspeed.as_deepspeed import install_as_deepspeed

        install_as_deepspeed()  # before transformers looks for deepspeed
    if not case.startswith("fsdp2"):
        import deepspeed  # noqa: F401
    from peft import get_peft_model  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with peak_of(found):
        if case.startswith("fsdp2"):
            loss_of, step = by_fsdp2(folder, case == "fsdp2, rank 0 reads")
        else:
            loss_of, step = by_deepspeeds_api(folder)
    if case == "shardcore 3":
        from shardcore.checkpoint.file_tensors import counts

        found["bytes_read"] = counts["bytes_read"]
    loss = loss_of(torch.arange(16).view(1, 16))
    step(loss)
    found["loss"] = float(loss)
    all_found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, found)
    if dist.get_rank() == 0:
        print("result " + json.dumps(all_found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


CASES = ("shardcore 3", "deepspeed 3", "fsdp2, rank 0 reads", "fsdp2, dcp")

# --- in the parent --------------------------------------------------------------------------------


def measure(case: str, folder: Path) -> list[dict[str, Any]]:
    """Run a case in ranks of its own; returns what each found."""
    with tempfile.TemporaryDirectory() as logs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.bench_load"]
        done = subprocess.run(
            [*command, "--rank-of", case, "--folder", str(folder), "--out", logs],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{case} failed with {done.returncode}:\n{done.stdout[-12000:]}")
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("result "))
    return found


def main() -> int:
    parser = suite.make_parser("load", __doc__, rounds=1, pause=0.0)
    parser.add_argument("--gb", type=float, default=4.0, help="of weights (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="where the files are written")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = suite.parse(parser)
    if options.rank_of:
        run_rank(options.rank_of, options.folder)
        return 0
    report: dict[str, Any] = {**suite.about_run("load", options), "cases": {}}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        size = write_model(folder, options.gb)
        config = config_of(options.gb)
        hidden, inner = config.hidden_size, config.intermediate_size
        unit = 2 * max(4 * hidden**2 + 3 * hidden * inner, 2 * config.vocab_size * hidden)
        report |= {"file_bytes": size, "unit_bytes": unit}
        report["bound_bytes"] = size // RANKS + 2 * unit + (1 << 30)
        for round_number in range(options.rounds):
            for case in options.cases:
                begun = time.perf_counter()
                ranks = measure(case, folder)
                found = report["cases"].setdefault(case, {"peak_bytes": [], "seconds": []})
                found["peak_bytes"].append([rank["peak_bytes"] for rank in ranks])
                found["seconds"].append(time.perf_counter() - begun)
                found["losses"] = [rank["loss"] for rank in ranks]
                if case == "shardcore 3":
                    read = sum(rank["bytes_read"] for rank in ranks)
                    found["read_of_files"] = read / size
                print(f"round {round_number}: {case}: {found['peak_bytes'][-1]}", flush=True)
    rows = [["", "peak of rank 0, GiB", "of the others, GiB", "of the files"]]
    for case, found in report["cases"].items():
        peaks = [max(ranks) for ranks in zip(*found["peak_bytes"], strict=True)]
        rows.append(
            [
                case,
                f"{peaks[0] / 2**30:.2f}",
                f"{max(peaks[1:]) / 2**30:.2f}",
                f"{max(peaks) / size:.2f}",
            ]
        )
    print(harness.table(rows))
    print(f"the bound: {report['bound_bytes'] / 2**30:.2f} GiB")
    harness.write_json(options.out / "load.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
