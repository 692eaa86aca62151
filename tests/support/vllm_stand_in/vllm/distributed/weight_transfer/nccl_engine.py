"""How a client sends weights: to a server of this process, in place of NCCL's broadcasts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class NCCLTrainerSendWeightsArgs:
    """group: a Server of vllm.server."""

    group: Any
    packed: bool


class NCCLWeightTransferEngine:
    """The trainer's side."""

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: NCCLTrainerSendWeightsArgs
    ) -> None:
        """Send all tensors."""
        assert trainer_args.packed
        trainer_args.group.receive(iterator)
