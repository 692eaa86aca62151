"""Agreement between ranks: every rank continues, or every rank raises.

`agree` compares calls and arguments before anything changes. `together` runs work that may fail on
one rank. Use these for every new comparison.

A rank must not raise alone: the others would wait for it in the next collective. So it collects its
exceptions (`attempt`), proposes, and raises when all ranks know. A proposal is one row of bytes:
the operation, whether this rank refuses, a digest of what has to be the same on every rank, and a
payload that the caller needs anyway, such as the squared norm of a step. Ranks that agree exchange
this row and nothing else. Words are gathered only after a difference. Rows without a payload have
one size and one kind of message, so that ranks in different calls find out at once. A payload has a
kind of its own, since gloo ends the process where the sizes of a pair of messages differ.

Two things are not compared. Buffers of modules: each rank has its own, as with DDP's
broadcast_buffers=False. Values that each rank brings itself (loads, edits, files, broadcast=False):
they must be equal, or replicas drift apart.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from shardcore.distributed.comm import Comm, Traffic
from shardcore.distributed.compare import Entry, first_difference, in_words
from shardcore.distributed.everyone import Everyone, Ranks

Tensors: TypeAlias = Mapping[str, torch.Tensor]

_HEADER = 3  # int64: the operation, whether this rank refuses, the digest
HEADER_BYTES = 8 * _HEADER


class OtherCallError(RuntimeError):
    """Ranks are in different collective calls: `calls`, in rank order."""

    def __init__(self, message: str, calls: Sequence[str]) -> None:
        """See the class."""
        super().__init__(message)
        self.calls = calls


def value_read(words: str) -> Entry:
    """Return the entry of a call that reads the same value on every rank, described in words."""
    return "value read", "", words


class Payload(NamedTuple):
    """Small tensors by name, of one dimension and on the CPU, alike on every rank.

    kind: Of the message, which no other call has with tensors of other sizes.
    name: Of the exchange, for the watchdog and the counts of collectives; empty for the call's.
    of_part: Makes a part's tensors of those of its ranks.
    """

    tensors: Tensors
    kind: Traffic = Traffic.READ
    name: str = ""
    of_part: Callable[[dict[str, torch.Tensor]], Tensors] = lambda of_ranks: {}


class Agreed(NamedTuple):
    """Payloads by name: a row for each rank of a part of the model, and for each part."""

    ranks: dict[str, torch.Tensor]
    parts: dict[str, torch.Tensor]


def attempt(problems: list[BaseException], *calls: Callable[[], Any]) -> None:
    """Make every call, and add what they raise to `problems`, which `agree` tells other ranks.

    Errors of any kind, and interrupts. Empty the list afterwards: its errors refer to frames that
    have it.
    """
    for call in calls:
        try:
            call()
        except BaseException as error:
            problems.append(error)


def agree(
    comm: Comm,
    op: str,
    problems: list[BaseException] | None = None,
    entries: Sequence[Entry] = (),
    *,
    payload: Payload | None = None,
    over: Sequence[Comm] = (),
    entries_of_model: Sequence[Entry] = (),
    explain: Callable[[], Exception | None] | None = None,
    then: str = "nothing was changed",
    of_work: bool = False,
) -> Agreed:
    """Raise on every rank if a rank has problems, is in another call than `op`, or has other
    entries; else return the payloads. Collective.

    The ranks of `comm` have one part of the model. The ranks of `over` (some of `comm.across`) have
    the other parts, and raise, too.

    Args:
        op: The call, as users know it.
        problems: Why this rank refuses. The first is taken out and raised.
        entries: What has to be the same on every rank of `comm`.
        payload: What the caller needs of the other ranks.
        entries_of_model: What has to be the same in every part, too.
        explain: Collective over `comm`: is called where only entries differ, and returns the
            error to raise, None for no difference that matters.
        then: The state that an error leaves.
        of_work: The problem is an error of work that continues by itself: it is not raised, and
            other ranks raise RuntimeError.

    Raises:
        BaseException: This rank's own problem.
        OtherCallError: Ranks are in different calls. (It is no ValueError: Trainer ignores a
            ValueError of a save.)
        ValueError: A rank refused, or entries differ; says which.
    """
    problems = [] if problems is None else problems
    payload = Payload({}) if payload is None else payload
    if comm.world_size == 1 and not over:
        if problems:
            _raise_own(problems)
        alone = _as_rows(payload.tensors)
        return Agreed(alone, _as_rows(payload.of_part(alone)))
    words = (_WordsOfWork if of_work else _Words)(comm, op, problems, then, over)
    return _propose(words, entries, payload, entries_of_model, explain)


def _propose(
    words: "_Words",
    entries: Sequence[Entry],
    payload: Payload,
    entries_of_model: Sequence[Entry],
    explain: Callable[[], Exception | None] | None,
) -> Agreed:
    comm, op, problems, over = words.comm, words.op, words.problems, words.over
    kind, name = payload.kind, payload.name or op
    own = _header(zlib.crc32(op.encode()), bool(problems), _digest(entries))
    try:
        comm.refuse_if_broken()
        rows, ranks = _exchange(
            lambda row: comm.all_gather_cpu(row, kind, name), own, payload.tensors
        )
        refuses = bool(rows[:, 1].any())
        other_call = bool((rows[:, 0] != own[0]).any())
        # the entries of a rank that refuses may be incomplete
        differs = other_call or (not refuses and bool((rows[:, 2] != own[2]).any()))
        of_part = payload.of_part(ranks)
        parts, parts_refuse, parts_differ, unlike_parts = _as_rows(of_part), refuses, differs, False
        if over:
            header = _header(refuses, differs, _digest(entries_of_model))
            headers, parts = _exchange(
                lambda row: comm.of_parts(row, kind, name, over), header, of_part
            )
            parts_refuse, parts_differ = headers[:, :2].any(0).tolist()
            unlike_parts = bool((headers[:, 2] != header[2]).any())
        if parts_refuse or parts_differ or unlike_parts:
            if parts_refuse:
                words.gather_refusal()
            if parts_differ:
                words.gather_difference(differs, other_call, entries, explain)
            elif unlike_parts and not parts_refuse:  # no part differs within: so on every rank
                words.gather_difference_of_parts(entries_of_model)
            words.raise_first()
    except Exception as error:
        if problems:  # the exchange that was to tell the other ranks failed, too
            _raise_both(error, problems)
        raise
    return Agreed(ranks, parts)


class _Words:
    """What an agreement that failed raises. Every rank gathers the same words in the same order."""

    def __init__(
        self,
        comm: Comm,
        op: str,
        problems: list[BaseException],
        then: str,
        over: Sequence[Comm],
    ) -> None:
        """See agree."""
        self.comm, self.op, self.problems = comm, op, problems
        self._then, self.over = then, over
        self._errors: list[Exception] = []  # the most telling first

    def gather_refusal(self) -> None:
        problem = in_words(self.problems[0]) if self.problems else None
        texts = self._gather(problem)
        refusals = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if refusals:
            self._errors.append(self._refused(*refusals[0]))

    def _refused(self, rank: int, text: str) -> Exception:
        return ValueError(f"{self.op}: rank {rank} refused: {text} ({self._then})")

    def gather_difference(
        self,
        differs: bool,
        other_call: bool,
        entries: Sequence[Entry],
        explain: Callable[[], Exception | None] | None,
    ) -> None:
        error: Exception | None = None
        if other_call:
            numbers = Everyone(self.comm, self.over).ranks_of_part
            error = _other_call(self.op, self.comm.gather_json(self.op), numbers)
        elif differs and explain is not None:
            error = explain()
        elif differs:
            error = difference(self.comm, self.op, entries, self._then, self.over)
        texts = self._gather(None if error is None else str(error))
        if isinstance(error, OtherCallError):
            self._errors.insert(0, error)  # a refusal was of another call
        elif error is not None:
            self._errors.append(error)
        else:
            self._errors += [ValueError(text) for text in texts if text is not None]

    def gather_difference_of_parts(self, entries: Sequence[Entry]) -> None:
        text = first_difference(self._gather(list(entries)))
        if text is not None:
            self._errors.append(
                ValueError(
                    f"{self.op}: parts of the model disagree: {text}; expected the same in every "
                    f"part ({self._then})"
                )
            )

    def _gather(self, value: Any) -> list[Any]:
        return Everyone(self.comm, self.over).gather_json(value)

    def raise_first(self) -> None:
        errors, problems = self._errors, self.problems
        if problems:
            _raise_own(problems)
        if errors:
            errors.reverse()
            raise errors.pop()


def _raise_own(problems: list[BaseException]) -> NoReturn:
    del problems[1:]
    raise problems.pop()  # an error in a variable of this frame would be in a cycle


def difference(
    comm: Comm, op: str, entries: Sequence[Entry], then: str, over: Sequence[Comm] = ()
) -> ValueError:
    """Return the error that names the first entry that differs between ranks. Collective.

    over: the Comms of the other parts of the model, which count in the numbers of ranks.
    """
    numbers = Everyone(comm, over).ranks_of_part
    text = first_difference(comm.gather_json(list(entries)), numbers)
    text = text or "their entries are in other orders"
    return ValueError(f"{op}: ranks disagree: {text}; expected the same on every rank ({then})")


def _other_call(op: str, calls: Sequence[str], numbers: Sequence[int]) -> OtherCallError:
    rank, call = next((rank, call) for rank, call in zip(numbers, calls, strict=True) if call != op)
    expected = "every rank to make the same calls in one order"
    if {"state_dict", "save_pretrained"} & {op, call}:
        expected += ", or one rank alone to save inside deepspeed.zero.GatheredParameters"
    return OtherCallError(f"{op}: rank {rank} calls {call}; expected {expected}", calls)


class _WordsOfWork(_Words):
    """The same for work that failed on a rank."""

    def _refused(self, rank: int, text: str) -> Exception:
        return RuntimeError(f"{self.op}: rank {rank} failed: {text}; {self._then}")

    def raise_first(self) -> None:
        if not self.problems:  # else the block's own error continues
            super().raise_first()


class together:  # noqa: N801 - it is called as a function is
    """A block that succeeds on every rank, or raises on every rank. Collective at its end.

    A rank where the block raises, by an error of any kind or an interrupt, raises that. The other
    ranks raise RuntimeError, which names the first of these ranks and its error; OtherCallError
    where ranks are in different calls.
    """

    def __init__(self, ranks: Ranks, op: str, then: str) -> None:
        """`ranks` run the block, as a part of the call `op`. then: the state that an error
        leaves.
        """
        self._ranks = ranks if isinstance(ranks, Everyone) else Everyone(ranks, ())
        self._op, self._then = op, then

    def __enter__(self) -> None:
        """See the class."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """See the class."""
        if error is not None:
            error.add_note(f"{self._op}: {self._then}")
        # after a gather that failed there is no exchange: no rank would be told
        if self._ranks.world_size == 1 or (error is not None and self._ranks.comm.broken):
            return  # the error continues
        problems = [] if error is None else [error]
        words = _WordsOfWork(self._ranks.comm, self._op, problems, self._then, self._ranks.parts)
        _propose(words, (), Payload({}), (), None)


def _exchange(
    gather: Callable[[torch.Tensor], torch.Tensor], header: torch.Tensor, payload: Tensors
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the rows of all ranks: their headers, and their payloads by name."""
    tensors = [header, *payload.values()]
    rows = gather(torch.cat([tensor.view(torch.uint8) for tensor in tensors]))
    columns = rows.split_with_sizes([tensor.nbytes for tensor in tensors], 1)
    headers, *payloads = (
        # a copy, aligned for its dtype
        column.flatten().clone().view(tensor.dtype).view(len(rows), tensor.numel())
        for column, tensor in zip(columns, tensors, strict=True)
    )
    return headers, dict(zip(payload, payloads, strict=True))


def _as_rows(payload: Tensors) -> dict[str, torch.Tensor]:
    return {key: row.unsqueeze(0) for key, row in payload.items()}


def _header(*numbers: int) -> torch.Tensor:
    # whatever torch's default device and dtype are
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _digest(entries: Sequence[Entry]) -> int:
    return zlib.crc32("\n".join(map("\0".join, entries)).encode(errors="surrogatepass"))


def _raise_both(error: Exception, problems: Sequence[BaseException]) -> NoReturn:
    """Raise the `error` of an exchange, caused by the first of `problems`; raise an interrupt
    itself.
    """
    if isinstance(problems[0], Exception):
        raise error from problems[0]
    raise problems[0] from error
