"""``shardcore estimate``: the memory and communication per rank of training a model, by
`predict`.
"""

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.distributed.topology import topology_of
from shardcore.engine.bucket import LIFETIMES
from shardcore.engine.quantized import nf4_like
from shardcore.engine.units import plan_units
from shardcore.estimate import fit
from shardcore.estimate.activations import Activations, activations_of, first_line
from shardcore.estimate.fit import columns
from shardcore.estimate.predict import Prediction, predict
from shardcore.offload import disk
from shardcore.offload.nvme_states import RATED_TBW
from shardcore.optim import FusedAdam
from shardcore.options import CHOICES, DTYPES, dtype_name

_KINDS = ("weights", "gradients", "master", "states", "communication")
_SIZES = {"GiB": 2**30, "MiB": 2**20}
_GIB = _SIZES["GiB"]
_SMALL = 0.1  # GiB; tables without larger totals are in MiB
# An allowance for the buffers that NCCL allocates for a communicator, outside of torch's allocator.
# They grow with the channels and peers of a GPU, which NCCL chooses: users report 0.5 to 0.7 GB for
# all-reduce among A100s (github.com/NVIDIA/nccl/issues/964) and 3 GB for an all-to-all among eight
# H100s (issues/1685).
_NCCL_GIB = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of estimate to its parser."""
    parser.usage = "shardcore estimate MODEL [OPTIONS]"
    ranks = dict.fromkeys(("gpus", "num_gpus", "nproc_per_node", "nproc"), "use --world-size")
    parser.set_defaults(others=ranks)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="MODULE:FUNCTION, a function without arguments that returns the model. With "
        "transformers installed: a config.json, its folder, or the id of a locally cached model",
    )
    parser.add_argument(
        "--stage",
        type=int,
        choices=sorted(LIFETIMES),
        help="ZeRO stage (default: each stage that the other options support)",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="numbers of ranks (default: 1)",
    )
    parser.add_argument(
        "--precision",
        type=dtype_name,
        choices=[choice for choice in CHOICES["precision"] if choice is not None],
        default="bf16",
        help="dtype of weights (default: %(default)s; shard() keeps the dtype of the model)",
    )
    parser.add_argument(
        "--grad-dtype",
        type=dtype_name,
        choices=CHOICES["grad_dtype"],
        default="fp32",
        help="dtype of reduced gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--master",
        choices=["fp32", "split"],
        default="fp32",
        help="master copy of 16-bit weights (default: %(default)s)",
    )
    parser.add_argument(
        "--state-dtype",
        choices=["fp32", "bf16", "8bit"],
        default="fp32",
        help="dtype of Adam's moments (default: %(default)s)",
    )
    parser.add_argument(
        "--qlora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters of this rank over a frozen model, with the linear layers of its "
        "blocks in 4 bits (bitsandbytes with double quantization)",
    )
    parser.add_argument(
        "--offload",
        choices=["cpu", "nvme"],
        help="move masters and Adam states to host memory or NVMe (default: keep them on the GPU)",
    )
    parser.add_argument(
        "--offload-gradients",
        action="store_const",
        const="cpu",
        help="also move reduced gradients to host memory (requires --offload)",
    )
    parser.add_argument(
        "--offload-params",
        nargs="?",
        const="cpu",
        choices=["cpu", "nvme"],
        help="also move weight shards, at stage 3 (without a value: cpu)",
    )
    parser.add_argument(
        "--prefetch",
        type=int,
        default=1,
        metavar="N",
        help="number of units gathered ahead, at stage 3 (default: %(default)s)",
    )
    parser.add_argument(
        "--disk",
        action="append",
        metavar="DIR",
        help="measure the disk of this directory and show seconds per step (requires --offload "
        "nvme); repeat the option to use several disks",
    )
    parser.add_argument(
        "--ratio",
        type=float,
        help="fraction of the states that --offload moves, 0 to 1 (default: 1)",
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="backward passes per step (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="add gradients within each node of N ranks first, then across nodes",
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="shard within each node and replicate across nodes (requires --ranks-per-node)",
    )
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="keep weights between forward and backward in parts on N consecutive ranks, at "
        "stage 3 (reshard_after_forward=N of shard())",
    )
    parser.add_argument(
        "--units",
        type=lambda text: int(text) if text.isdigit() else text,
        default="auto",
        metavar="N",
        help='minimum number of parameters per unit (default: "auto", one unit per repeated block)',
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="sequences per rank and forward; shows activations (requires --seq-len)",
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help="tokens per sequence; shows activations with and without checkpointing (requires "
        "--batch)",
    )
    parser.add_argument(
        "--nccl",
        type=float,
        default=_NCCL_GIB,
        metavar="GIB",
        help="memory for the buffers of each NCCL communicator (default: %(default)s, an "
        "allowance)",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="choose stage and offload for the memory given by --device-memory and --host-memory. "
        "With --batch, also choose checkpointing. If nothing fits, try split masters and 8-bit "
        "moments",
    )
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="memory of one GPU (for --fit)"
    )
    parser.add_argument(
        "--activations",
        type=float,
        metavar="GIB",
        help="activations per rank, for --fit (default: estimated from --batch and --seq-len, or a "
        "tenth of the GPU)",
    )
    parser.add_argument(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="memory of one machine, shared by up to 8 ranks or by --ranks-per-node (for --fit)",
    )
    parser.add_argument(
        "--disk-space",
        type=float,
        default=0.0,
        metavar="GIB",
        help="NVMe space per machine, for --fit (default: 0)",
    )
    for name, default, of in (
        (
            "--link",
            25.0,
            "GB/s between GPU and host memory, per direction (default: %(default)s, PCIe 4)",
        ),
        ("--network", 50.0, "GB/s that one rank sends to other ranks (default: %(default)s)"),
        (
            "--adam",
            1.0,
            "billions of elements per second that Adam updates on one rank's CPU cores (default: "
            "%(default)s)",
        ),
    ):
        parser.add_argument(name, type=_rate, default=default, metavar="RATE", help=of)
    parser.add_argument("--json", action="store_true", help="print JSON in bytes instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print the estimate. ValueError, TypeError or OSError for what cannot be estimated."""
    if options.disk is not None and options.offload != "nvme":
        raise ValueError(
            f"estimate: --disk with --offload {options.offload}; expected --offload nvme, which "
            f"uses a disk"
        )
    if (options.batch is None) != (options.seq_len is None):
        raise ValueError("estimate: --batch and --seq-len belong together; pass both")
    if options.batch is not None and options.activations is not None:
        raise ValueError("estimate: --activations and --batch are both given; pass one of them")
    if options.batch is not None and min(options.batch, options.seq_len) < 1:
        raise ValueError("estimate: --batch or --seq-len is below 1; expected at least 1")
    _check_flags(options)
    model = build(options.model)
    activations = None
    if options.batch is not None:
        dtype = DTYPES[options.precision]
        activations = activations_of(model, dtype, options.batch, options.seq_len, options.units)
    if options.qlora is not None:
        to_qlora(model, options.qlora)
    if options.fit:
        return _fit(model, options, activations)
    if any((options.device_memory, options.activations, options.host_memory, options.disk_space)):
        raise ValueError(
            "estimate: memory of a machine is given without --fit; expected --fit, which chooses "
            "what fits it"
        )
    least_stage = 0
    if options.offload_params is not None:
        least_stage = 3
    elif options.offload_gradients is not None:
        least_stage = 1
    stages = [options.stage]
    if options.stage is None:
        stages = [stage for stage in sorted(LIFETIMES) if stage >= least_stage]
    predictions = [
        (world_size, stage, _predict(model, options, world_size, stage))
        for world_size in options.world_size
        for stage in stages
    ]
    rates = None
    if options.disk is not None:
        engine = disk.file_engine()
        rates = disk.striped([disk.measure(engine, Path(folder)) for folder in options.disk])
    if options.json:
        more: dict[str, Any] = {} if activations is None else {"activations": vars(activations)}
        entries = [
            _plain(*entry, rates) | {"nccl": _nccl_bytes(options, entry[0], entry[1])} | more
            for entry in predictions
        ]
        print(json.dumps(entries, indent=1))
        return 0
    first = predictions[0][2]
    most = max(_nccl_bytes(options, ranks, stage) for ranks, stage, _ in predictions)
    largest = max(sum(entry[2].resting.by_tier.values()) for entry in predictions)
    unit = "GiB" if largest >= _SMALL * _GIB else "MiB"
    below = ["activations"] * (activations is not None) + ["NCCL's buffers"] * (most > 0)
    excluded = f"The table excludes {' and '.join(below)}, which follow it. " if below else ""
    if activations is None:
        excluded += "Activations are not estimated without --batch and --seq-len."
    print(
        f"{options.model}: {first.numel:,} parameters in {first.units} units. {unit} of rank 0. "
        f"{excluded.strip()}"
    )
    masters = "" if options.precision == "fp32" else f", {options.master} masters"
    print(
        f"{options.precision} weights{masters}, {options.state_dtype} moments, "
        f"{options.grad_dtype} reduced gradients"
    )
    on_disk = options.offload == "nvme"
    rows = [
        [
            "ranks",
            "stage",
            *_KINDS,
            "on device",
            "on cpu",
            *["on nvme"] * on_disk,
            "total",
            "sent per step",
            "collectives",
        ]
    ]
    for world_size, stage, prediction in predictions:
        report = prediction.resting
        tiers = [report.by_tier.get(tier, 0) for tier in ("device", "cpu", *["nvme"] * on_disk)]
        sizes = [*(report.by_kind.get(kind, 0) for kind in _KINDS), *tiers, sum(tiers)]
        cells = [_in(unit, count) for count in [*sizes, prediction.sent_bytes]]
        collectives = sum(transfer.collectives for transfer in prediction.transfers)
        rows.append([str(world_size), str(stage), *cells, str(collectives)])
    print(columns(rows))
    if activations is not None:
        print(
            f"activations of {options.batch} x {options.seq_len:,} tokens, on the device: "
            f"{_in(unit, activations.whole)} {unit}, or {_in(unit, activations.checkpointed)} if "
            f"each unit is checkpointed ({activations.source})"
        )
    if most:
        print(f"NCCL's buffers, on the device: about {_gib(most)} GiB (an allowance: --nccl)")
    if on_disk:
        sizes_on_disk = [f"{unit} read per step", f"{unit} written", f"{unit} on disk"]
        disk_rows = [["ranks", "stage", *sizes_on_disk, "disk, s*", "steps until worn*"]]
        for world_size, stage, prediction in predictions:
            disk_rows.append([str(world_size), str(stage), *disk_row(prediction, rates, unit)])
        print("\n" + columns(disk_rows))
        print(
            f"* if one rank has the disk for itself, rated for {RATED_TBW} TB of writes: N ranks "
            f"on it take N times as long"
        )
        print("  and wear it N times as fast")
    if len(predictions) == 1:
        print("\n" + columns(_transfer_rows(first, unit)))
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Raise ValueError under the names of the flags, for what `shard` and `predict` would refuse
    under other names.
    """
    for name, value in (
        ("--device-memory", options.device_memory),
        ("--host-memory", options.host_memory),
    ):
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"estimate: {name} is {value:g}; expected a number of GiB above 0")
    for name, value in (
        ("--activations", options.activations),
        ("--disk-space", options.disk_space),
        ("--nccl", options.nccl),
    ):
        if value is not None and not 0.0 <= value < math.inf:
            raise ValueError(f"estimate: {name} is {value:g}; expected 0 or more GiB")
    for folder in options.disk or ():
        if not Path(folder).is_dir():
            raise ValueError(f"estimate: --disk {folder} is not an existing directory")
    units = options.units
    if units != "auto" and (isinstance(units, str) or units < 1):
        raise ValueError(
            f'estimate: --units is {units}; expected "auto", or a number of parameters above 0'
        )
    if options.qlora is not None and options.qlora < 1:
        raise ValueError(f"estimate: --qlora is {options.qlora}; expected at least 1")
    if options.accumulate < 1:
        raise ValueError(f"estimate: --accumulate is {options.accumulate}; expected at least 1")
    if options.prefetch < 0:
        raise ValueError(f"estimate: --prefetch is {options.prefetch}; expected 0 or more")
    for world_size in options.world_size:
        if world_size < 1:
            raise ValueError(f"estimate: --world-size is {world_size}; expected at least 1")
        per_node = options.ranks_per_node
        if per_node is not None and (per_node < 1 or world_size % per_node):
            raise ValueError(
                f"estimate: --ranks-per-node is {per_node}; expected a divisor of --world-size "
                f"{world_size}"
            )
    if options.fit:
        return  # _fit refuses the flags below
    if options.hybrid and options.ranks_per_node is None:
        raise ValueError(
            "estimate: --hybrid is given without --ranks-per-node; expected the number of ranks "
            "in a node"
        )
    _check_keep(options)
    if options.ratio is not None:
        if not 0.0 <= options.ratio <= 1.0:
            raise ValueError(
                f"estimate: --ratio is {options.ratio:g}; expected a number from 0 to 1"
            )
        if options.offload is None:
            raise ValueError("estimate: --ratio is given without --offload; expected both")
    if options.offload_gradients is not None:
        if options.offload is None:
            raise ValueError(
                "estimate: --offload-gradients is given without --offload; expected both"
            )
        if options.stage == 0:
            raise ValueError(
                "estimate: --offload-gradients is given with --stage 0; expected stage 1, 2 or 3"
            )
        if options.ratio == 0.0:
            raise ValueError(
                "estimate: --offload-gradients is given with --ratio 0; expected a ratio above 0"
            )
    if options.offload_params is not None and options.stage not in (None, 3):
        raise ValueError(
            f"estimate: --offload-params is given with --stage {options.stage}; expected stage 3"
        )
    if options.offload_params == "nvme" and (
        options.offload != "nvme" or options.ratio not in (None, 1.0)
    ):
        raise ValueError(
            "estimate: --offload-params nvme needs --offload nvme, and no --ratio below 1"
        )


def _check_keep(options: argparse.Namespace) -> None:
    """Raise ValueError for --keep without stage 3, or if it does not divide the ranks that share
    weights.
    """
    if options.keep is None:
        return
    if options.stage not in (None, 3):
        raise ValueError(
            f"estimate: --keep is given with --stage {options.stage}; expected --stage 3"
        )
    for world_size in options.world_size:
        sharing = options.ranks_per_node if options.hybrid else world_size
        if options.keep < 1 or sharing % options.keep:
            raise ValueError(
                f"estimate: --keep is {options.keep}; expected a divisor of {sharing}, the number "
                f"of ranks that share weights"
            )


def _nccl_bytes(options: argparse.Namespace, world_size: int, stage: int) -> int:
    """Return the allowance for NCCL's communicators of a rank, as `shard` makes them."""
    per_node = options.ranks_per_node
    topology = topology_of(world_size, per_node, per_node if options.hybrid else None)
    kept = range(options.keep or 0 if stage == 3 else 0)
    parts = {ranks for ranks in (*topology.levels(0), kept) if 1 < len(ranks) < world_size}
    return int(((world_size > 1) + len(parts)) * options.nccl * _GIB)


@dataclass(frozen=True)
class _Attempt:
    """The fit of one form of masters and moments, with or without checkpointing.

    reserved: bytes of activations and NCCL on a rank's device. considered: see `fit.fit`.
    """

    form: Mapping[str, str]
    checkpoints: bool
    reserved: int
    considered: Sequence[fit.Candidate]

    @property
    def best(self) -> fit.Candidate | None:
        """Return what fits, and is the fastest; None if nothing fits."""
        return fit.chosen_of(self.considered)

    @property
    def changes(self) -> list[str]:
        """Return the arguments of FusedAdam in this form."""
        return [f"{name}={value!r}" for name, value in self.form.items() if value != "fp32"]

    @property
    def name(self) -> str:
        """Return the form and whether units are checkpointed, in words."""
        words = ", ".join([*self.changes, *["checkpointing"] * self.checkpoints])
        return words or "float32 masters and moments"

    def row(self, device: int) -> list[str]:
        """Return what fits on a device of so many bytes, as a row of a table."""
        best = self.best
        if best is None:
            return [self.name, "-", "does not fit", "-", "-"]
        free = device - self.reserved - best.prediction.resting.by_tier.get("device", 0)
        spent = f"{best.milliseconds:.0f}" + " and the disk" * best.on_disk
        return [self.name, str(best.stage), best.named_offload, spent, _gib(free)]


def _forms(options: argparse.Namespace) -> list[dict[str, str]]:
    """Return masters and moments to try: as asked for, then smaller ones."""
    masters, moments = [options.master], [options.state_dtype]
    if options.master == "fp32" and options.precision == "bf16":
        masters.append("split")
    if options.state_dtype == "fp32":
        moments.append("8bit")
    return [
        {"master": master, "state_dtype": state_dtype}
        for state_dtype in moments
        for master in masters
    ]


def _fit(model: nn.Module, options: argparse.Namespace, activations: Activations | None) -> int:
    """Print what was considered for a machine, and how shard is called for what fits; returns 1
    if nothing does.
    """
    if options.device_memory is None or options.host_memory is None:
        raise ValueError(
            "estimate: --fit without --device-memory or --host-memory; expected both, in GiB"
        )
    refused = {
        "--offload": options.offload,
        "--offload-gradients": options.offload_gradients,
        "--offload-params": options.offload_params,
        "--disk": options.disk,
        "--json": options.json or None,
        "--ratio": options.ratio,
        "--keep": options.keep,
        "--hybrid": options.hybrid or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"estimate: {name} with --fit; expected --fit alone, which chooses what to offload"
            )
    if len(options.world_size) > 1:
        raise ValueError(
            f"estimate: --world-size has {len(options.world_size)} numbers with --fit; expected one"
        )
    (world_size,) = options.world_size
    kept_gib = options.device_memory / 10 if options.activations is None else options.activations
    kept = [int(kept_gib * _GIB)]
    of_activations = "a tenth of it" if options.activations is None else "as given"
    if activations is not None:
        kept = [activations.whole, activations.checkpointed]
        of_activations = f"{activations.source}, the second if each unit is checkpointed"
    device, host, space = (
        int(gib * _GIB) for gib in (options.device_memory, options.host_memory, options.disk_space)
    )
    sharing = min(world_size, options.ranks_per_node or 8)
    rates = fit.Rates(
        *(1e9 * rate for rate in (options.link, options.link, options.adam, options.network))
    )
    nccl = _nccl_bytes(options, world_size, 3)

    def attempt(form: Mapping[str, str], checkpoints: bool) -> _Attempt:
        def predicted(stage: int, offload: Any) -> Prediction:
            asked = argparse.Namespace(**{**vars(options), **form})
            return _predict(model, asked, world_size, stage, offload)

        machine = fit.Machine(device, kept[checkpoints] + nccl, host, space, sharing)
        considered = fit.fit(machine, rates, world_size, predicted, options.stage)
        return _Attempt(form, checkpoints, machine.activations, considered)

    attempts = [
        attempt(form, checkpoints)
        for form in _forms(options)
        for checkpoints in (False, True)[: len(kept)]
    ]
    chosen = next((one for one in attempts if one.best is not None), attempts[-1])
    numel = chosen.considered[0].prediction.numel
    print(
        f"{options.model}: {numel:,} parameters, {_counted_ranks(world_size)} ({sharing} per "
        f"machine). GiB and ms are per rank. The times exclude compute (forward, backward and "
        f"recomputation)"
    )
    print(
        f"on its device also {' or '.join(map(_gib, kept))} of activations, {of_activations}, and "
        f"{_gib(nccl)} for NCCL (--nccl)"
    )
    print(fit.table(chosen.considered))
    title = ["with", "stage", "offload", fit.TIME, f"free of {_gib(device)} GiB"]
    print("\n" + columns([title, *(one.row(device) for one in attempts)]))
    best = chosen.best
    if best is None:
        print("nothing fits: add ranks, host memory, --disk-space or GPU memory")
        return 1
    usual = {
        "grad_dtype": "fp32",
        "accumulate": 1,
        "ranks_per_node": None,
        "prefetch": 1,
        "units": "auto",
    }
    unusual = {
        name: getattr(options, name)
        for name, value in usual.items()
        if getattr(options, name) != value
    }
    if best.stage != 3:
        unusual.pop("prefetch", None)
    print(f"\nfits with {chosen.name}:")
    if chosen.changes:
        print(f"optimizer = shardcore.FusedAdam(model.parameters(), {', '.join(chosen.changes)})")
    if chosen.checkpoints:
        print("shardcore.apply_activation_checkpointing(model)")
    print(f"model, optimizer = {fit.call_of(best, {'precision': options.precision, **unusual})}")
    return 0


def _counted_ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count != 1)


def _rate(text: str) -> float:
    rate = float(text)
    if not 0.0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}; expected a number above 0")
    return rate


def disk_row(prediction: Prediction, rates: disk.Rates | None, unit: str) -> list[str]:
    """Return of a rank with states on disk the bytes read and written per step, and taken, in
    `unit`; seconds; steps.
    """
    use = prediction.disk
    assert use is not None
    seconds = "-" if rates is None else f"{use.seconds(rates):.3g}"
    return [
        _in(unit, use.read),
        _in(unit, use.written),
        _in(unit, use.space),
        seconds,
        f"{use.steps_until_worn:,}",
    ]


def build(name: str) -> nn.Module:
    """Return the model that is meant, on the meta device: of `module:function`, or of a
    configuration of transformers.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        return _of_transformers(name)
    if module_name.endswith(".py"):
        raise ValueError(
            f"estimate: MODEL is {name!r}; did you mean {_dotted(module_name)}:{function_name}?"
        )
    sys.path.insert(0, os.getcwd())
    not_found = f"{name} was not found from {os.getcwd()}"
    failed = f"importing {module_name} failed"
    try:
        module = importlib.import_module(module_name)
        failed = not_found
        function = getattr(module, function_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # the module itself, or its package, and not another one that it imports
        if f"{module_name}.".startswith(f"{missing}."):
            failed = not_found
        raise ValueError(f"estimate: {failed}: {_said(error)}") from error
    if isinstance(function, nn.Module):
        raise TypeError(
            f"estimate: {name} is already a model; pass a class or a function that makes it"
        )
    if not callable(function):
        raise TypeError(
            f"estimate: {name} is a {type(function).__name__}; expected a function or class that "
            f"makes a model"
        )
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise ValueError(f"estimate: {name}() raised {_said(error)}") from error
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"estimate: {name} returned a {type(model).__name__}; expected a torch.nn.Module"
        )
    return model


def to_qlora(model: nn.Module, rank: int) -> None:
    """Freeze a model on the meta device, put the linear layers of its blocks into 4 bits, and give
    each an adapter of this rank.
    """
    model.requires_grad_(False)
    blocks = [unit.module for unit in plan_units(model) if unit.name]
    layers = {layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear}
    for layer in layers:
        layer.weight = nf4_like(layer.weight)
        layer.lora_A = nn.Linear(layer.in_features, rank, bias=False, device="meta")
        layer.lora_B = nn.Linear(rank, layer.out_features, bias=False, device="meta")
    if not layers:
        raise ValueError(
            "estimate: --qlora needs linear layers in repeated blocks, and the model has none"
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _dotted(path: str) -> str:
    """Return the name of the module in a file."""
    return path.rstrip(":").removesuffix(".py").removeprefix("./").replace("/", ".")


def _of_transformers(name: str) -> nn.Module:
    """Build the model of a config.json, of a folder that has one, or of an id in the cache of
    Hugging Face's hub.
    """
    expected = (
        "expected MODULE:FUNCTION, a config.json, a folder with one, or the id of a model "
        "in the local cache"
    )
    path = Path(name)
    module_name = _dotted(name)
    module_file = Path(*module_name.split(".")).with_suffix(".py")
    if path.suffix == ".py" or (not path.exists() and module_file.is_file()):
        raise ValueError(
            f"estimate: MODEL is {name!r}, which names no function; add :FUNCTION, as in "
            f"examples.llama:llama_7b"
        )
    if not path.exists() and (path.suffix == ".json" or path.is_absolute() or name[0] == "."):
        raise ValueError(f"estimate: MODEL is {name!r}, but there is no such file; {expected}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"estimate: MODEL is {name!r}, a folder without config.json; {expected}")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"estimate: MODEL is {name!r}, which needs transformers ({first_line(error)}); "
            f"{expected}"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:
        why = "which is not in the local cache"
        if path.exists():
            why = f"from which transformers makes no configuration ({_said(error)})"
        raise ValueError(f"estimate: MODEL is {name!r}, {why}; {expected}") from error
    architecture = (config.architectures or ["AutoModel"])[0]
    try:
        kind = getattr(transformers, architecture, transformers.AutoModel)
        with torch.device("meta"):
            model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    except Exception as error:
        raise ValueError(
            f"estimate: MODEL is {name!r}, of which transformers cannot make a {architecture} "
            f"({_said(error)}); {expected}"
        ) from error
    return model  # type: ignore[no-any-return]


def _predict(
    model: nn.Module,
    options: argparse.Namespace,
    world_size: int,
    stage: int,
    offload: Mapping[str, Any] | None = None,
) -> Prediction:
    if options.master == "split" and options.precision != "bf16":
        raise ValueError(
            f"estimate: --master is split with --precision {options.precision}; expected bf16, or "
            f"--master fp32"
        )
    params = [param for param in model.parameters() if param.requires_grad]
    # --keep is of stage 3, and is ignored at the others where no stage was chosen
    keeps = options.keep is not None and (options.stage is not None or stage == 3)
    return predict(
        model,
        FusedAdam(params, master=options.master, state_dtype=options.state_dtype),
        stage,
        world_size=world_size,
        precision=options.precision,
        grad_dtype=options.grad_dtype,
        offload=_offload(options) if offload is None else offload,
        accumulate=options.accumulate,
        ranks_per_node=options.ranks_per_node,
        hybrid=options.hybrid,
        prefetch=options.prefetch if stage == 3 else 1,
        reshard_after_forward=options.keep if keeps else True,
        units=options.units,
    )


def _offload(options: argparse.Namespace) -> dict[str, Any] | None:
    tiers = {
        "gradients": options.offload_gradients,
        "params": options.offload_params,
        "ratio": options.ratio,
    }
    chosen = {key: value for key, value in tiers.items() if value is not None}
    if options.offload == "nvme":
        chosen["path"] = "."  # nothing is written there
    if options.offload is None and not chosen:
        return None
    return {"optimizer": options.offload, **chosen}


def _plain(
    world_size: int, stage: int, prediction: Prediction, rates: disk.Rates | None
) -> dict[str, Any]:
    resting: dict[str, dict[str, int]] = {}
    for line in prediction.resting.lines:
        by_kind = resting.setdefault(line.tier, dict.fromkeys(_KINDS, 0))
        by_kind[line.kind] += line.bytes
    use = prediction.disk
    disk_entry: dict[str, Any] = {}
    if use is not None:
        disk_entry["disk"] = vars(use)
        if rates is not None:
            disk_entry["disk"] = vars(use) | {
                "bytes_per_second": vars(rates),
                "seconds": use.seconds(rates),
            }
    return {
        "world_size": world_size,
        "stage": stage,
        "parameters": prediction.numel,
        "units": prediction.units,
        "bytes": resting,
        "transfers": [vars(transfer) for transfer in prediction.transfers],
        **disk_entry,
    }


def _transfer_rows(prediction: Prediction, unit: str) -> list[list[str]]:
    rows = [
        [transfer.purpose, str(transfer.collectives), _in(unit, transfer.bytes)]
        for transfer in prediction.transfers
    ]
    return [["per step", "collectives", f"{unit} sent"], *rows]


def _in(unit: str, count: int) -> str:
    return f"{count / _SIZES[unit]:.2f}"


def _gib(count: int) -> str:
    return _in("GiB", count)
