"""DeepSpeed's zero_to_fp32 under its own names, over checkpoints of shardcore (and of DeepSpeed).

python -m shardcore.deepspeed.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--tag TAG]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.consolidate import MAX_SHARD_BYTES, bytes_of, consolidate, of_source, read
from shardcore.checkpoint.load import open_checkpoint


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in float32, on the CPU; tied ones are the same tensor under each name.

    exclude_frozen_parameters: leave out what has no optimizer state and is no buffer. Raises OSError or ValueError.
    """
    with open_checkpoint("zero_to_fp32", Path(checkpoint_dir), tag) as source:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in of_source(source, torch.float32).items():
            if exclude_frozen_parameters and name in source.frozen:
                continue
            found[name] = torch.cat([torch.empty(0, dtype=tensor.dtype), *read(source, name, torch.float32)]).view(tensor.shape)
        return found | {name: found[first] for name, first in source.tied.items() if first in found}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str = MAX_SHARD_BYTES,
    tag: str | None = None,
) -> None:
    """Write the weights of a checkpoint in float32 as .safetensors files: see shardcore.consolidate."""
    consolidate(checkpoint_dir, output_dir, tag=tag, dtype=torch.float32, max_shard_bytes=bytes_of(max_shard_size))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a plain model, and return it."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint_dir", help="what save_checkpoint was given, or one checkpoint")
    parser.add_argument("output_dir", help="where .safetensors files are written, or the name of one")
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file (default: 5GB)")
    given: Any = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(given.checkpoint_dir, given.output_dir, given.max_shard_size, given.tag)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
