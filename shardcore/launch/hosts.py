"""Which machines a job has, and which of their slots it takes: DeepSpeed's hostfile, --include and
--exclude.

A slot is the number of a GPU among those that a machine shows to the job (CUDA_VISIBLE_DEVICES);
without GPUs, of a process. Source:
https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node.
"""

import re
from collections.abc import Mapping
from pathlib import Path

Slots = dict[str, list[int]]  # of each host, in the order of ranks


def read_hostfile(path: Path) -> Slots:
    """Return the slots of each host, from lines such as ``worker-0 slots=8  # a comment``.
    Raises ValueError, OSError.
    """
    slots_of_hosts: Slots = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if match is None or int(match[2]) == 0:
            raise ValueError(
                f"run: line {number} of {path} is {text!r}; expected HOST slots=N, with N above 0"
            )
        if match[1].startswith("-"):
            raise ValueError(
                f"run: line {number} of {path} has the host {match[1]!r}; expected a name, or "
                f"user@name"
            )
        if match[1] in slots_of_hosts:
            raise ValueError(
                f"run: line {number} of {path} has {match[1]} again; expected each host once"
            )
        slots_of_hosts[match[1]] = list(range(int(match[2])))
    if not slots_of_hosts:
        raise ValueError(f"run: {path} has no host; expected lines such as: worker-0 slots=8")
    return slots_of_hosts


def select(pool: Mapping[str, list[int]], include: str, exclude: str) -> Slots:
    """Return what a filter such as ``worker-0@worker-1:0,2`` leaves of the pool, in the pool's
    order. Raises ValueError.
    """
    if include and exclude:
        raise ValueError("run: --include and --exclude are both given; expected one of them")
    if include:
        named = _parse(include, "--include", pool)
        return {host: named[host] for host in pool if host in named}
    named = _parse(exclude, "--exclude", pool) if exclude else {}
    remaining = {
        host: [slot for slot in slots if slot not in named.get(host, ())]
        for host, slots in pool.items()
    }
    remaining = {host: slots for host, slots in remaining.items() if slots}
    if not remaining:
        raise ValueError(f"run: --exclude {exclude} leaves nothing of {_slot_counts(pool)}")
    return remaining


def trim(pool: Mapping[str, list[int]], num_nodes: int | None, num_slots: int | None) -> Slots:
    """Return the first `num_nodes` hosts with their first `num_slots` slots (None: all). Raises
    ValueError.
    """
    if num_nodes is not None and num_nodes > len(pool):
        raise ValueError(
            f"run: --num_nodes is {num_nodes} but there are {len(pool)} hosts: {_slot_counts(pool)}"
        )
    chosen = dict(list(pool.items())[:num_nodes])
    for host, slots in chosen.items():
        if num_slots is not None and num_slots > len(slots):
            raise ValueError(
                f"run: --num_gpus is {num_slots} but {host} has {len(slots)} slots; expected at "
                f"most as many"
            )
    return {host: slots[:num_slots] for host, slots in chosen.items()}


def _parse(text: str, option: str, pool: Mapping[str, list[int]]) -> Slots:
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in pool:
            raise ValueError(
                f"run: {option} names the host {host!r}; expected one of {', '.join(pool)}"
            )
        if not re.fullmatch(r"\d+(,\d+)*" if colon else "", numbers):
            raise ValueError(
                f"run: {option} has {part!r}; expected HOST or HOST:SLOT,SLOT, joined by @"
            )
        slots = [int(number) for number in numbers.split(",")] if colon else pool[host]
        absent = [slot for slot in slots if slot not in pool[host]]
        if absent:
            raise ValueError(
                f"run: {option} names slot {absent[0]} of {host}; expected one of 0 to "
                f"{len(pool[host]) - 1}"
            )
        named.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in named.items()}


def _slot_counts(pool: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{host} ({len(slots)} slots)" for host, slots in pool.items())
