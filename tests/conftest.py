"""What holds for every test: its threads, Ctrl-C, the files that are read, the first, marks that
are set, skipped gpu tests.
"""

import functools
import gc
import itertools
import os
import pathlib
import signal

import pytest
import torch

FIRST = "tests/test_cpp.py"  # the longest single test; last, it would run alone


def pytest_configure() -> None:
    """Give each of several pytest workers its share of the cores: threads that wait for each
    other's cores are slow.

    And let Ctrl-C be noticed: a shell's jobs in the background begin without it, and tests send it
    to themselves.
    """
    # torch keeps a list of its constructors, made here, not while transformers has replaced one
    with torch.device("meta"):
        torch.empty(0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def why_no_gpu() -> str | None:
    """Return why tests marked gpu cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    # not at the top: some tests run where the extension is not built
    from shardcore._native import _C

    return None if _C.build_info()["cuda"] else "this build has no CUDA"


@functools.cache
def starts_ranks(path: pathlib.Path) -> bool:
    """Return whether a test file imports from tests/support/ranks.py, which starts processes."""
    return "\nfrom tests.support.ranks import " in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leave the files of ranks unread where none of their tests is wanted: importing them would
    take half of make quick.
    """
    unwanted = "not ranks" in config.option.markexpr and " or " not in config.option.markexpr
    return (
        True
        if unwanted and collection_path.suffix == ".py" and starts_ranks(collection_path)
        else None
    )


def pytest_collection_finish() -> None:
    """Leave what the imports of all tests have made out of later collections of garbage, which
    took up to a second each.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest test first; mark the files that import from tests/support/ranks.py, and cases
    that make test leaves out.

    Skip tests marked gpu without a CUDA device or a build for it, and say which is missing.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for module in {item.getparent(pytest.Module) for item in items} - {None}:
        if starts_ranks(module.path):
            module.add_marker("ranks")
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if item.get_closest_marker("slow") is None]
        for marker in [mark for item in cases[:1] if (mark := item.get_closest_marker("cases"))]:
            (count,) = marker.args
            # spread evenly
            kept = {(2 * number + 1) * len(cases) // (2 * count) for number in range(count)}
            for number, item in enumerate(cases):
                if number not in kept:
                    item.add_marker("more")
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = why_no_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
