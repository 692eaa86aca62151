"""What the ranks of one machine share: its memory and its cores."""

import socket

from shardcore.comm import Comm
from shardcore.host_cores import own_cores, quota, worker_threads
from shardcore.host_memory import free_bytes


def short_of_memory(comm: Comm, needed: int) -> MemoryError | None:
    """Say whether the ranks of this machine need more host memory than it has free; `needed`: bytes, of this rank."""
    here = socket.gethostname()
    neighbours = [count for host, count in comm.gather_json([here, needed]) if host == here]
    free = free_bytes()
    if not needed or free is None or sum(neighbours) <= free:
        return None
    return MemoryError(
        f"shard: offload needs {sum(neighbours)} bytes ({sum(neighbours) / 2**30:.1f} GiB) of host memory for the "
        f"{len(neighbours)} ranks of {here}, which has {free} bytes ({free / 2**30:.1f} GiB) free; expected at least as many "
        "(free memory, raise the memory limit of the container, use more machines or a higher stage, or do not offload)"
    )


def worker_threads_of(comm: Comm) -> int:
    """Return how many threads a lazy step's worker gets where the user does not say. Collective."""
    here = socket.gethostname()
    return worker_threads([cores for host, cores in comm.gather_json([here, own_cores()]) if host == here], quota())
