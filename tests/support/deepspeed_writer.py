"""Writes checkpoints with DeepSpeed itself, each beside the values that its writer had.

Run once per rank: python -m tests.support.deepspeed_writer DIR, with RANK, WORLD_SIZE and so on
set. In DIR/<case> is the checkpoint, in DIR/<case>.pt what the engine had when it wrote it: full
float32 weights and states by DeepSpeed's own calls, and what zero_to_fp32 makes of the files.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.support.foreign import Model

BF16, FP16 = (
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "loss_scale_window": 2, "initial_scale_power": 8}},
)
# stage, of zero_optimization, of the configuration
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero0_fp32": (0, {}, {}),
    "zero1_fp32": (1, {}, {}),
    "zero1_bf16": (1, {}, BF16),
    "zero1_bf16_optimizer": (1, {}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2_bf16": (2, {}, BF16),
    "zero2_fp16": (2, {}, FP16),
    "zero2_round_robin": (2, {"round_robin_gradients": True}, BF16),
    "zero2_aligned": (2, {"parameter_alignment": True}, BF16),
    "zero2_elastic": (2, {"elastic_checkpoint": True}, FP16),
    "zero3_bf16": (3, {"sub_group_size": 100}, BF16),
    "zero3_fp16": (3, {}, FP16),
}
UNIVERSAL = ("zero1_bf16", "zero2_fp16", "zero3_bf16")


def write(case: str, folder: Path) -> None:
    stage, zero, more = CASES[case]
    torch.manual_seed(0)
    model = Model()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **more,
    }
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99))
    in_groups = [
        [names[id(param)] for param in group["params"]] for group in optimizer.param_groups
    ]
    engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = next(engine.module.parameters()).dtype
    for step in range(3):
        x = torch.randn(
            2, 7, generator=torch.Generator().manual_seed(10 * step + engine.global_rank)
        )
        engine.backward(engine(x.to(dtype)).float().pow(2).mean())
        engine.step()
    client_state = {
        "epoch": 3,
        "best": float("inf"),
        "rng": torch.get_rng_state(),
        "args": Namespace(lr=0.1),
    }
    engine.save_checkpoint(str(folder / case), client_state=client_state)
    has = {
        "weights": {},
        "states": {},
        "buffers": dict(engine.module.named_buffers()),
        "names": in_groups,
        "groups": [
            {k: v for k, v in group.items() if k != "params"}
            for group in engine.optimizer.param_groups
        ],
        "scheduler": scheduler.state_dict(),
        "counters": {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps},
    }
    # with two groups DeepSpeed links states before the second has any
    if stage in (1, 2) and case != "zero1_bf16_optimizer":
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if stage == 0:
            has["weights"][name] = param.detach()
            has["states"][name] = {
                key: value for key, value in optimizer.state[param].items() if key != "step"
            }
        elif param.requires_grad:
            has["weights"][name] = safe_get_full_fp32_param(param)
            has["states"][name] = {
                key: safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")
            }
        else:
            with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
                has["weights"][name] = param.detach().clone()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    has["scaler"] = None if scaler is None or not scaler.dynamic else vars(scaler) | {"dtype": None}
    if engine.global_rank == 0:
        has["consolidated"] = (
            {} if stage == 0 or case == "zero1_bf16_optimizer" else consolidated(folder / case)
        )
        torch.save(has, folder / f"{case}.pt")
        if case in UNIVERSAL:
            to_universal(
                folder / case / "global_step3", folder / f"{case}_universal" / "global_step3"
            )
    deepspeed.comm.barrier()


def consolidated(folder: Path) -> dict[str, torch.Tensor]:
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name: tensor.clone() for name, tensor in found.items()}


def to_universal(given: Path, out: Path) -> None:
    options = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    ds_to_universal.main(
        Namespace(
            input_folder=str(given), output_folder=str(out), inject_missing_state=True, **options
        )
    )


def vary(folder: Path) -> None:
    """Write files as other optimizers or layouts of DeepSpeed's would be: variants of
    zero1_bf16, by the objects they hold.
    """
    given = folder / "zero1_bf16" / "global_step3"

    # DeepSpeedCPUAdam, and FusedAdam, count in Python's numbers
    def count_in_state(held: dict[str, Any]) -> None:
        for state in held["base_optimizer_state"]["state"].values():
            state["step"] = int(state["step"])

    def count_in_group(held: dict[str, Any]) -> None:  # as FusedAdam did
        for index, group in enumerate(held["base_optimizer_state"]["param_groups"]):
            group["step"] = int(held["base_optimizer_state"]["state"][index].pop("step"))

    def experts(held: dict[str, Any]) -> None:
        held["partition_count"] = [2, 1]

    def sgd(held: dict[str, Any]) -> None:
        for state in held["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")

    for change in (count_in_state, count_in_group, experts, sgd):
        out = folder / change.__name__
        out.mkdir()
        for file in given.iterdir():
            held = torch.load(file, weights_only=False)
            if "optimizer_state_dict" in held:
                change(held["optimizer_state_dict"])
            torch.save(held, out / file.name)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # slow on CPUs, and exact
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # a faster all-reduce, which would be compiled now
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    for case in CASES:
        write(case, folder)
    if os.environ["RANK"] == "0":
        vary(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
