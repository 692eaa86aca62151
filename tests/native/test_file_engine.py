"""Files written and read by the engine, and each thing that can go wrong there: detected, and
named by file and offset.
"""

import errno
import io
import os
import resource
import subprocess
import sys
import threading
import zlib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from shardcore._native import _C
from tests.support import ranks

MIB = 1 << 20
BACKENDS = ["threads"] + ["io_uring"] * (_C.FileEngine("auto", depth=1).backend == "io_uring")
SIZES = [0, 1, 511, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 2 * MIB + 4096, 5_000_003]

HEAD = """
import ctypes, errno, os, resource, signal, sys, threading, torch
from shardcore._native import _C
signal.alarm(120)  # ends what would hang
path, backend = sys.argv[1:3]
"""


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "file"


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def write(engine: _C.FileEngine, path: Path, data: torch.Tensor, direct: bool = True) -> int:
    writer = _C.FileWriter(engine, path, data.nbytes, direct)
    crc = writer.append(data)
    writer.finish()
    writer.close()
    return crc


def run(script: str, path: Path, backend: str = "auto", **env: str) -> str:
    """Run a script in a process of its own, which is forked; returns what it printed."""
    return ranks.run_fresh(_run_here, HEAD + script, str(path), backend, env)


def _run_here(script: str, path: str, backend: str, env: dict[str, str]) -> str:
    os.environ.update(env)
    sys.argv[1:] = [path, backend]
    with redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    return printed.getvalue()


# Checksums


def slow_crc32c(data: bytes, polynomial: int = 0x82F63B78) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# RFC 3720, B.4, and the check value of the catalogues.
KNOWN = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"": 0,
}


def test_checksums_are_castagnoli():
    for data, crc in KNOWN.items():
        tensor = torch.tensor(list(data), dtype=torch.uint8)
        assert _C.crc32c(tensor) == crc == slow_crc32c(data)
    assert zlib.crc32(b"123456789") != 0xE3069283 == slow_crc32c(b"123456789"), (
        "another polynomial is another checksum"
    )


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 23_999, 24_000, 24_001, 100_003])
def test_checksums_of_any_size_and_dtype(size):
    data = random_bytes(size, size)
    crc = slow_crc32c(data.numpy().tobytes())
    assert _C.crc32c(data) == crc
    data[size // 2] ^= 1
    assert _C.crc32c(data) != crc
    values = torch.randn(3, 5, dtype=torch.bfloat16)
    assert (
        _C.crc32c(values)
        == _C.crc32c(values.view(torch.uint8))
        == slow_crc32c(values.view(torch.uint8).numpy().tobytes())
    )


def test_tensors_without_plain_memory_are_refused(path):
    two = torch.zeros(4, 4)
    with pytest.raises(
        ValueError, match=r"crc32c: tensor has shape .*; expected a contiguous tensor"
    ):
        _C.crc32c(two.t()[:2])
    writer = _C.FileWriter(_C.FileEngine("threads"), path, 8)
    with pytest.raises(
        ValueError, match=r"FileWriter\.append: tensor has device meta; expected cpu"
    ):
        writer.append(torch.zeros(2, device="meta"))


# Files that come back


@pytest.mark.parametrize(
    ("size", "direct"), [(size, number % 2 == 0) for number, size in enumerate(SIZES)]
)
def test_files_of_any_size(backend, path, size, direct):
    engine = _C.FileEngine(backend, depth=3)
    assert engine.backend == backend
    data = random_bytes(size, size)
    path.write_bytes(b"an older and longer file" * 1000)
    writer = _C.FileWriter(engine, path, size, direct)
    parts = [data[: size // 3], data[size // 3 : size // 2], data[:0], data[size // 2 :]]
    assert [writer.append(part) for part in parts] == [_C.crc32c(part) for part in parts]
    writer.finish()
    assert path.read_bytes() == data.numpy().tobytes()
    writer.close()
    writer.close()
    reader = _C.FileReader(engine, str(path), direct)
    assert reader.size_bytes == size
    ranges = [(0, size), (size, 0), (size // 3, size // 3), (max(0, size - 1), min(1, size))]
    reads = [reader.start(offset, nbytes) for offset, nbytes in ranges]
    reader.close()
    for (offset, nbytes), read in zip(ranges, reads, strict=True):
        assert torch.equal(read.wait(), data[offset : offset + nbytes])


def test_a_file_is_overwritten_in_place(backend, path):
    engine = _C.FileEngine(backend)
    old, new = random_bytes(3 * MIB + 5, 1), random_bytes(3 * MIB + 1, 2)
    write(engine, path, old)
    inode = path.stat().st_ino
    writer = _C.FileWriter(engine, path, new.nbytes, overwrite=True)
    assert path.stat().st_size >= new.nbytes, "it was not emptied"
    writer.append(new)
    writer.finish()
    assert path.read_bytes() == new.numpy().tobytes()
    assert path.stat().st_ino == inode
    with pytest.raises(OSError, match="reserve"):
        _C.FileWriter(_C.FileEngine(backend, faults="reserve:ENOSPC"), path, 10, overwrite=True)
    assert path.read_bytes() == new.numpy().tobytes()


def test_appended_tensors_may_change_at_once(backend, path):
    engine = _C.FileEngine(backend, depth=2, faults="delay:2")
    data = torch.arange(MIB, dtype=torch.int32)
    writer = _C.FileWriter(engine, path, 3 * data.nbytes)
    for _ in range(3):
        writer.append(data)
        data += 1
    writer.finish()
    values = (
        _C.FileReader(engine, path).start(0, 3 * data.nbytes).wait().view(torch.int32).view(3, -1)
    )
    assert torch.equal(values, torch.stack([data - 3, data - 2, data - 1]))


def test_what_was_read_outlives_everything_and_is_not_reused(backend, path):
    engine = _C.FileEngine(backend)
    data = random_bytes(300_000)
    write(engine, path, data)
    reader = _C.FileReader(engine, path)
    kept = [reader.start(i, 200_000).wait() for i in range(3)]
    view = reader.start(7, 200_000).wait()[5:100]
    last = reader.start(9, 200_000)
    del reader, engine
    assert torch.equal(last.wait(), data[9:200_009])
    assert torch.equal(view, data[12:107])
    for i, tensor in enumerate(kept):
        assert torch.equal(tensor, data[i : 200_000 + i])
        tensor.zero_()


@pytest.mark.more
def test_a_wait_leaves_python_to_other_threads(backend, path):
    engine = _C.FileEngine(backend, depth=1, faults="delay:100")
    path.write_bytes(bytes(4 * MIB))
    reader = _C.FileReader(engine, path)
    order = []
    begun = threading.Event()

    def wait() -> None:
        read = reader.start(0, 4 * MIB)
        begun.set()
        read.wait()
        order.append("waited")

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    order.append("meanwhile")
    thread.join()
    assert order == ["meanwhile", "waited"]


# What goes wrong


@pytest.mark.parametrize(
    "faults",
    ["short", "write:EINTR,read:EINTR", "write:EAGAIN,read:EAGAIN", "write:EINVAL,read:EINVAL"],
)
def test_transfers_are_continued_and_tried_again(backend, path, faults):
    engine = _C.FileEngine(backend, faults=faults)
    data = random_bytes(3_000_001)
    assert write(engine, path, data) == _C.crc32c(data)
    assert path.read_bytes() == data.numpy().tobytes()
    assert torch.equal(_C.FileReader(engine, path).start(1, 3_000_000).wait(), data[1:])


@pytest.mark.parametrize(
    ("name", "at"), [("EIO", 0), ("ENOSPC", MIB), ("EROFS", 2 * MIB + 17), ("EIO", 5 * MIB + 2)]
)
def test_a_failed_write_is_named_by_file_and_offset(backend, path, name, at):
    engine = _C.FileEngine(backend, depth=2, faults=f"write:{name}@{at}")
    data = random_bytes(5 * MIB + 3)
    writer = _C.FileWriter(engine, path, data.nbytes)
    begin = at - at % MIB
    for attempt in (
        lambda: (writer.append(data), writer.finish()),
        writer.finish,
        lambda: writer.append(data[:0]),
    ):
        with pytest.raises(
            OSError, match=rf"write at offset {begin} failed: \d+ bytes asked at {begin}, 0 done"
        ) as raised:
            attempt()
        assert (raised.value.errno, raised.value.filename) == (getattr(errno, name), str(path))
        assert str(path) in str(raised.value)
    writer.close()
    write(_C.FileEngine(backend), path, data)  # the same place, without the fault
    assert path.read_bytes() == data.numpy().tobytes()


@pytest.mark.parametrize("faults", ["read:EIO@2097160", "stuck"])
def test_a_failed_read_is_named_by_file_and_offset(backend, path, faults):
    data = random_bytes(4 * MIB)
    path.write_bytes(data.numpy().tobytes())
    engine = _C.FileEngine(backend, depth=1, faults=faults)
    reader = _C.FileReader(engine, path)
    bad, good = reader.start(2 * MIB, 2 * MIB), reader.start(0, MIB)
    with pytest.raises(
        OSError, match="read at offset 2097152 failed: 1048576 bytes asked at 2097152, 0 done"
    ) as raised:
        bad.wait()
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    if faults != "stuck":
        assert torch.equal(good.wait(), data[:MIB])


def test_an_error_after_a_part_says_how_much_was_done(backend, path):
    engine = _C.FileEngine(backend, faults=f"short,write:EIO@{MIB - 1}")
    data = random_bytes(MIB)
    writer = _C.FileWriter(engine, path, MIB)
    with pytest.raises(OSError, match=rf"write at offset 0 failed: {MIB} bytes asked at 0, 0 done"):
        (writer.append(data), writer.finish())
    path.write_bytes(data.numpy().tobytes())
    reader = _C.FileReader(_C.FileEngine(backend), path)
    os.truncate(path, MIB // 2 + 5)
    with pytest.raises(OSError, match=rf"{MIB} bytes asked at 0, {MIB // 2}\d* done") as raised:
        reader.start(0, MIB).wait()
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("op", ["read", "write"])
def test_flipped_bits_are_found_by_the_checksum(backend, path, op):
    engine = _C.FileEngine(backend, faults=f"flip:{op}@{MIB + 1}")
    data = random_bytes(2 * MIB + 1)
    crc = write(engine, path, data)
    assert crc == _C.crc32c(data)
    read = _C.FileReader(engine, path).start(0, data.nbytes).wait()
    assert _C.crc32c(read) != crc
    assert torch.equal((read != data).nonzero(), torch.tensor([[MIB + 1]]))
    assert (path.read_bytes() == data.numpy().tobytes()) == (op == "read")


@pytest.mark.parametrize(
    ("faults", "number", "text"),
    [
        ("reserve:ENOSPC", errno.ENOSPC, "reserve 2097152 bytes"),
        ("sync:EIO", errno.EIO, "fdatasync"),
    ],
)
def test_space_and_durability_are_checked(backend, path, faults, number, text):
    with pytest.raises(OSError, match=text) as raised:
        write(_C.FileEngine(backend, faults=faults), path, random_bytes(2 * MIB))
    assert (raised.value.errno, raised.value.filename) == (number, str(path))


@pytest.mark.more
def test_a_full_disk_is_found_when_the_file_is_made(backend, path):
    """The system's own error: a limit of file sizes, which the space of a file is taken from as
    well.
    """
    script = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    _C.FileWriter(_C.FileEngine(backend), path, (1 << 20) + 1)
except OSError as error:
    print(error.errno, os.path.getsize(path))
"""
    assert run(script, path, backend).split() == [str(errno.EFBIG), "0"]


def test_paths_are_checked_by_the_system(backend, path, tmp_path):
    engine = _C.FileEngine(backend)
    with pytest.raises(FileNotFoundError, match=r"open: No such file") as raised:
        _C.FileReader(engine, path)
    assert raised.value.filename == str(path)
    with pytest.raises(FileNotFoundError):
        _C.FileWriter(engine, tmp_path / "none" / "file", 1)
    with pytest.raises(IsADirectoryError):
        _C.FileReader(engine, tmp_path)
    with pytest.raises(OSError, match="expected a regular file"):
        _C.FileReader(engine, "/dev/null")
    with pytest.raises(ValueError, match="null"):
        _C.FileReader(engine, "a\0b")
    odd = tmp_path / os.fsdecode(b"\xff \xc3\xa4")
    write(engine, odd, random_bytes(10))
    assert _C.FileReader(engine, os.fsencode(odd)).size_bytes == 10


def test_sizes_and_ranges_are_checked(backend, path):
    engine = _C.FileEngine(backend)
    with pytest.raises(ValueError, match="size_bytes has -1; expected 0 or more"):
        _C.FileWriter(engine, path, -1)
    writer = _C.FileWriter(engine, path, 10)
    with pytest.raises(ValueError, match=r"tensor has 12 bytes; expected at most 10"):
        writer.append(torch.zeros(3))
    writer.append(torch.zeros(2))
    with pytest.raises(ValueError, match=r"has 8 bytes; expected 10 \(append the rest"):
        writer.finish()
    writer.append(torch.ones(2, dtype=torch.uint8))
    writer.finish()
    with pytest.raises(ValueError, match="is finished; expected a file that is being written"):
        writer.append(torch.zeros(0))
    writer.close()
    with pytest.raises(ValueError, match="is closed; expected a file that is being written"):
        writer.finish()
    reader = _C.FileReader(engine, path)
    for offset, nbytes in [(-1, 1), (0, 11), (10, 1), (11, 0), (0, -1), (5, 2**63 - 1)]:
        with pytest.raises(ValueError, match=r"lie outside of .*; expected a part of its 10 bytes"):
            reader.start(offset, nbytes)
    read = reader.start(8, 2)
    assert read.wait().tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="was called before; expected one call"):
        read.wait()
    reader.close()
    with pytest.raises(ValueError, match="is closed; expected an open reader"):
        reader.start(0, 0)


@pytest.mark.parametrize(
    "faults", ["write", "write:EFOO", "flip:read", "delay:", "shorter", "sync:EIO@x", ","]
)
def test_faults_and_backends_are_checked(faults):
    with pytest.raises(ValueError, match=r"faults has .*; expected rules such as"):
        _C.FileEngine(faults=faults)
    with pytest.raises(ValueError, match=r"backend has .*; expected auto, io_uring or threads"):
        _C.FileEngine("aio")
    with pytest.raises(ValueError, match="depth has 0; expected 1 to 256"):
        _C.FileEngine(depth=0)


# Processes, threads, resources


def test_an_unfinished_file_is_left_and_closed(backend, path):
    engine = _C.FileEngine(backend, faults="delay:5")
    before = os.listdir("/proc/self/fd")
    writer = _C.FileWriter(engine, path, 8 * MIB)
    writer.append(random_bytes(7 * MIB))
    del writer  # waits for what is in flight
    assert path.exists()
    reader = _C.FileReader(engine, path)
    for offset in range(4):
        reader.start(offset, MIB)  # nobody waits
    del reader
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.more
def test_a_forked_child_is_told_and_the_parent_goes_on(backend, path):
    data = random_bytes(4 * MIB)
    path.write_bytes(data.numpy().tobytes())
    script = """
engine = _C.FileEngine(backend, faults="delay:50", depth=2)
reader = _C.FileReader(engine, path)
read = reader.start(1, 4000000)
writer = _C.FileWriter(engine, path + "2", 4 << 20)
writer.append(torch.ones(3 << 20, dtype=torch.uint8))
pid = os.fork()
if pid == 0:
    for call in (read.wait, lambda: reader.start(0, 10), lambda: writer.append(torch.ones(9)), writer.finish):
        try:
            call()
        except RuntimeError as error:
            assert "was made before this process was forked; expected one made in this process" in str(error), error
        else:
            os._exit(1)
    del reader, writer, read, engine
    own = _C.FileReader(_C.FileEngine(backend), path)
    os._exit(0 if own.start(1, 100).wait().numel() == 100 else 2)
assert os.waitpid(pid, 0)[1] == 0
writer.append(torch.zeros(1 << 20, dtype=torch.uint8))
writer.finish()
print(_C.crc32c(read.wait()), os.path.getsize(path + "2"))
"""
    assert run(script, path, backend).split() == [str(_C.crc32c(data[1:4_000_001])), str(4 * MIB)]


@pytest.mark.more
def test_an_interpreter_ends_with_transfers_in_flight(path):
    script = """
sys.held = []
for each in backend.split():
    engine = _C.FileEngine(each, faults="delay:20")
    writer = _C.FileWriter(engine, path, 8 << 20)
    writer.append(torch.zeros(8 << 20, dtype=torch.uint8))
    reader = _C.FileReader(engine, path)
    reads = [reader.start(0, 1 << 20) for _ in range(8)]
    sys.held.append((engine, writer, reader, reads))
print("end")
"""
    command = [sys.executable, "-c", HEAD + script, str(path), " ".join(BACKENDS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


@pytest.mark.more
def test_threads_start_with_the_first_transfer_and_end_with_the_engine(path):
    script = """
def count():
    return len(os.listdir("/proc/self/task"))
small, large = torch.zeros(1000), torch.zeros(1 << 18)  # torch starts threads of its own
before = count()
engine = _C.FileEngine(backend, depth=4)
writer = _C.FileWriter(engine, path, 8 << 20)
writer.append(small)
quiet = count()
for _ in range(7):
    writer.append(large)
busy = count()
del writer, engine
import time
for _ in range(1000):  # the system takes a moment to end a thread
    if count() == before: break
    time.sleep(0.01)
print(before, quiet - before, 1 <= busy - before, count() - before)
"""
    for backend in BACKENDS:
        assert run(script, path, backend).split()[1:] == ["0", "True", "0"]


# Puts a filter into this process by which io_uring_setup is forbidden, as containers have it.
FORBID = """
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
class Line(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Line))]
program = Program(len(code), (Line * len(code))(*code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
"""
USE = """
writer = _C.FileWriter(engine, path, 3 << 20)
crc = writer.append(torch.arange(3 << 18, dtype=torch.int32))
writer.finish()
assert _C.crc32c(_C.FileReader(engine, path).start(0, 3 << 20).wait()) == crc
print(engine.backend, engine.note, sep="|")
"""


@pytest.mark.more
@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_where_io_uring_is_forbidden_threads_take_its_place(path):
    assert run(FORBID + "engine = _C.FileEngine()" + USE, path) == (
        "threads|io_uring is not used: io_uring_setup: Operation not permitted\n"
    )
    script = "try:\n    _C.FileEngine('io_uring')\nexcept OSError as error:\n    print(error)"
    assert "io_uring is not used: io_uring_setup: Operation not permitted" in run(
        FORBID + script, path
    )


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def many_requests(backend: str, path: Path, count: int) -> tuple[int, int]:
    """Make small reads and writes by one engine; returns how many descriptors and KiB of memory
    they cost.
    """
    engine = _C.FileEngine(backend, depth=8)
    data = random_bytes(10_000)
    write(engine, path, data)
    reader = _C.FileReader(engine, path)

    def some(requests: int) -> None:
        for first in range(0, requests, 50):
            reads = [reader.start((first + i) % 9000, 1 + i) for i in range(49)]
            for i, read in enumerate(reads):
                if i % 2:
                    assert read.wait()[0] == data[(first + i) % 9000]
            if first % 1000 == 0:
                _C.FileWriter(engine, path.with_name("other"), 5000).append(data[:5000])
                with pytest.raises(OSError, match="No such file"):
                    _C.FileReader(
                        engine, path / "none" if path.is_dir() else path.with_name("none")
                    )

    some(2000)  # what is kept is there now
    files, memory = len(os.listdir("/proc/self/fd")), resident_kib()
    some(count)
    return len(os.listdir("/proc/self/fd")) - files, resident_kib() - memory


@pytest.mark.more
@pytest.mark.parametrize("count", [20_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_many_requests_leak_nothing(backend, path, count):
    # of a process that does nothing else
    files, memory = ranks.run_fresh(many_requests, backend, path, count)
    assert files == 0
    # 0.4 KiB for a request would be; of 300,000, the smallest piece that malloc gives (32 bytes)
    assert memory < 8 * 1024


# Names


def test_names_are_exchanged_in_one_step(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/inside").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileNotFoundError):
        _C.exchange_paths(tmp_path / "a", tmp_path / "none")
    if not _C.exchange_paths(tmp_path / "a", str(tmp_path / "b")):
        pytest.skip("this file system cannot")
    assert (tmp_path / "a").read_text() == "b"
    assert (tmp_path / "b/inside").read_text() == "a"
