"""DeepSpeed's zero_to_fp32 under its own names, over checkpoints of shardcore (and of DeepSpeed).

python -m shardcore.deepspeed.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--tag TAG]
[--exclude_frozen_parameters]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.consolidate import (
    MAX_SHARD_BYTES,
    Tensors,
    bytes_of,
    of_source,
    read,
    write,
)
from shardcore.checkpoint.load import open_checkpoint
from shardcore.checkpoint.source import Source


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the weights of a checkpoint in float32, on the CPU; tied ones are the same tensor
    under each name.

    exclude_frozen_parameters: leave out parameters that did not train. lazy_mode: each is read when
    its `contiguous()` is called. Raises OSError or ValueError.
    """
    source = open_checkpoint("zero_to_fp32", Path(checkpoint_dir), tag)
    tensors: dict[str, Any] = {
        name: SimpleNamespace(
            shape=torch.Size(tensor.shape),
            dtype=tensor.dtype,
            contiguous=partial(_whole, source, name, tensor),
        )
        for name, tensor in _tensors(source, exclude_frozen_parameters).items()
    }
    if not lazy_mode:
        with source:
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return tensors | {
        name: tensors[first] for name, first in source.tied.items() if first in tensors
    }


def _whole(source: Source, name: str, tensor: torch.Tensor) -> torch.Tensor:
    parts = read(source, name, torch.float32)
    return torch.cat([torch.empty(0, dtype=tensor.dtype), *parts]).view(tensor.shape)


def _tensors(source: Source, exclude_frozen: bool) -> Tensors:
    tensors = of_source(source, torch.float32)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (exclude_frozen and name in source.frozen)
    }


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = MAX_SHARD_BYTES,
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in float32 as .safetensors files: see
    shardcore.consolidate.

    max_shard_size: None writes one file. safe_serialization: False, DeepSpeed's default, is
    refused, since it means pickles.
    """
    if not safe_serialization:
        raise ValueError(
            "zero_to_fp32: safe_serialization is False; expected True (the default): it writes "
            ".safetensors files, and transformers loads them. For a torch.save file, save the "
            "return value of get_fp32_state_dict_from_zero_checkpoint"
        )
    size = sys.maxsize if max_shard_size is None else bytes_of(max_shard_size)
    with open_checkpoint("zero_to_fp32", Path(checkpoint_dir), tag) as source:
        tensors = _tensors(source, exclude_frozen_parameters)
        values = (part for name in tensors for part in read(source, name, torch.float32))
        write(tensors, values, Path(output_dir), size)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a plain model, and return it."""
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint_dir", help="what save_checkpoint was given, or one checkpoint")
    parser.add_argument(
        "output_dir", help="where .safetensors files are written, or the name of one"
    )
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file (default: 5GB)")
    parser.add_argument(
        "--safe_serialization",
        action="store_true",
        help="write .safetensors files, as is done anyway",
    )
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that did not train",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error comes from")
    options = vars(parser.parse_args(arguments))
    debug = options.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**{**options, "safe_serialization": True})
    except (OSError, ValueError) as error:
        if debug:
            raise
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
