"""What tests of models on the meta device share: building them, filling them, and writing files
for them.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.gpt import GPT, rotary_angles
from tests.support.models import Net

_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a .safetensors file by the format's own words, so that tests need no package."""
    header, blob = {}, b""
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        shape, offsets = list(tensor.shape), [len(blob), len(blob) + len(data)]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)
    return path


def init(module: nn.Module) -> None:
    """What building does: reset_parameters, and what the tests' Net and the example make
    themselves.
    """
    if isinstance(module, Net):
        module.gain.fill_(1.0)
        module.offset.zero_()
    elif isinstance(module, GPT):
        config = module.config
        module.angles = rotary_angles(config.context, config.dim // config.heads)
    else:
        module.reset_parameters()


def meta(build: Callable[[], nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return build()


def frozen_net(net: Callable[[], Any] = Net) -> Any:
    model = net()
    model.blocks[1].requires_grad_(False)
    model.inp.weight.requires_grad_(False)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model
