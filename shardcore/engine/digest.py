"""What tells values of one rank from those of another."""

import torch

from shardcore.telling import as_bytes


def digest_of(values: torch.Tensor) -> str:
    """Return a digest that tells values of one rank from those of another: the sum of their bits, 8 bytes at a time.

    One pass where they lie. The order of these words does not count; a checksum in which it does would cost a copy to the host.
    """
    data = as_bytes(values.detach().contiguous())
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() - data.numel() % 8
    total = int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))
    return f"{total & 0xFFFFFFFFFFFFFFFF:x}"
