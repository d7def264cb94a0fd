"""The history of a run: JSON lines, appended while things happen. Nothing else knows the format.

One object a line, in order of time. Times are this process's monotonic clock in nanoseconds (`at`), by which everything
is judged, and the wall clock in milliseconds (`wall`), for people who compare with logs of services.

| type        | fields beside `at`, `wall`         | says                                                         |
|-------------|------------------------------------|--------------------------------------------------------------|
| run         | facts of the run                   | first line: command, seed, commit, images; `version` of this |
| invoke      | n, op, process, operation's own    | a client is about to send a request; n counts from 1         |
| ok          | n, operation's own                 | the answer came: it was done                                 |
| failed      | n, error                           | the answer came, or nothing was sent: it was *not* done      |
| unknown     | n, error                           | no definite answer: it may have been done, or be done later  |
| fault-begin | n, fault, target, fault's own      | a fault is about to be injected                              |
| fault-end   | n, outcome, fault's own            | healed (`ok`), `failed`, or `not offered` here               |
| observation | what, values                       | something was looked at                                      |

An operation without its end (the runner died) is unknown. Operations and their fields:

| op      | process  | invoke                               | ok                                                       |
|---------|----------|--------------------------------------|----------------------------------------------------------|
| produce | producer | topic; sequences, sizes, digests: a  | ids: for each a message id, or "failed" or "unknown"     |
|         |          | list each, in the request's order    |                                                          |
| receive | consumer | topic, subscription, kind ("shared"  | messages: [id, producer, sequence, digest, redeliveries] |
|         |          | or "exclusive")                      |                                                          |
| ack     | consumer | topic, subscription, ids             |                                                          |
| read    | reader   | topic, start ("earliest" or an id),  | messages: [id, producer, sequence, digest]; end: whether |
|         |          | round                                | nothing stands behind them                               |

A message that is not ours has producer "" and sequence -1. `round` numbers the readings of a topic from `earliest` on:
the last one that came to its end is the truth.

| what             | values                                                                                   |
|------------------|------------------------------------------------------------------------------------------|
| subscribed       | topic, subscription, kind: durably there before the first message was sent               |
| drained          | topic, subscription, complete: whether its consumers acknowledged all there is, in time  |
| under-replicated | count: ledgers that are marked now                                                       |
| ready            | ready, wanted: pods or processes                                                         |
| replicas         | compared: entries of which every copy was read; diverged: a text for each that is wrong  |
| incomplete       | reason: a part of the run failed or was not done; the verdict is at best INCOMPLETE      |
| note             | text                                                                                     |

| fault's own        | where | meaning                                                                               |
|--------------------|-------|---------------------------------------------------------------------------------------|
| gap_s_max          | begin | longest time that any topic may be without a successful produce because of it         |
| entries_copied_max | begin | most entries that healing may copy because of it (0: a rolling restart)               |
| entries_copied     | end   | entries that were copied because of it; must be there when entries_copied_max was     |
| bytes_copied       | end   | their bytes                                                                           |
| detail             | end   | text                                                                                  |
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

VERSION: Final = 1
TYPES: Final = frozenset(("run", "invoke", "ok", "failed", "unknown", "fault-begin", "fault-end", "observation"))
ERROR_LENGTH_MAX: Final = 300
"""Characters of an error that are kept."""
_OUTCOMES: Final = frozenset(("ok", "failed", "not offered"))
_compact: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


class HistoryError(Exception):
    """A history that cannot be read as one; says which line, and why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line. `n` is 0 where the type has none; `values` are all fields beside type, at, wall and n."""

    type: str
    at: int
    wall: int
    n: int
    values: Mapping[str, Any]

    @property
    def at_s(self) -> float:
        return self.at / 1e9


class Fault:
    """A fault under way; what is measured goes into its end."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.outcome = "ok"
        self.values: dict[str, Any] = {}

    def measured(self, **values: Any) -> None:
        """`entries_copied`, `bytes_copied`, `detail`: see the module's tables."""
        self.values.update(values)

    def not_offered(self, why: str) -> None:
        """This cluster has no way to inject it. It counts neither as passed nor as failed."""
        self.outcome = "not offered"
        self.values["detail"] = why


class History:
    """Writes a history. Each line is handed to the operating system before the call returns, so that it survives a
    crash of this process (not of the machine); nothing is kept in memory.

    For one thread: the event loop's. `clock` counts nanoseconds and never goes back, `wall` is nanoseconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        *,
        facts: Mapping[str, Any] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """Makes `path` with its first line. `facts`: command, seed, commit, images and whatever repeats the run.

        Raises FileExistsError: a history is never appended to by a second run, whose clock is another.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._clock = clock
        self._wall = wall
        self._count = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._write("run", {"version": VERSION, **(facts or {})})

    # -- operations ------------------------------------------------------------------------------------------------

    def invoke(self, op: str, process: str, **values: Any) -> int:
        """The operation's number; call it before the request is sent, and one of ok, failed, unknown after."""
        self._count += 1
        self._write("invoke", {"n": self._count, "op": op, "process": process, **values})
        return self._count

    def ok(self, n: int, **values: Any) -> None:
        self._write("ok", {"n": n, **values})

    def failed(self, n: int, error: str) -> None:
        self._write("failed", {"n": n, "error": error[:ERROR_LENGTH_MAX]})

    def unknown(self, n: int, error: str) -> None:
        self._write("unknown", {"n": n, "error": error[:ERROR_LENGTH_MAX]})

    # -- faults and observations -----------------------------------------------------------------------------------

    def fault_begin(self, fault: str, target: str, **values: Any) -> int:
        self._count += 1
        self._write("fault-begin", {"n": self._count, "fault": fault, "target": target, **values})
        return self._count

    def fault_end(self, n: int, outcome: str = "ok", **values: Any) -> None:
        """Once it is healed and the cluster is whole again, as far as this fault's own measure goes."""
        assert outcome in _OUTCOMES, outcome
        self._write("fault-end", {"n": n, "outcome": outcome, **values})

    @contextmanager
    def fault(self, fault: str, target: str, **values: Any) -> Iterator[Fault]:
        """The block is the fault: begin, end, and `failed` with the error when it raises (which goes on)."""
        under_way = Fault(self.fault_begin(fault, target, **values))
        try:
            yield under_way
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"[:ERROR_LENGTH_MAX]
            self.fault_end(under_way.n, "failed", **{**under_way.values, "detail": detail})
            raise
        self.fault_end(under_way.n, under_way.outcome, **under_way.values)

    def observe(self, what: str, **values: Any) -> None:
        self._write("observation", {"what": what, **values})

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        line = _compact({"type": kind, "at": self._clock(), "wall": self._wall() // 1_000_000, **fields})
        data = memoryview(line.encode() + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]


def read_history(path: Path) -> Iterator[Record]:
    """Every record, one at a time. A last line without its end (the runner died while it wrote) is left out.

    Raises HistoryError for anything else that is no history, FileNotFoundError.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            record = _parse(line, number)
            if number == 1 and (record.type != "run" or record.values.get("version") != VERSION):
                raise HistoryError(f"{path}: line 1 is no beginning of a history of version {VERSION}")
            yield record


def _parse(line: bytes, number: int) -> Record:
    try:
        fields = json.loads(line)
        kind, at, wall = fields.pop("type"), fields.pop("at"), fields.pop("wall")
        record = Record(kind, at, wall, fields.pop("n", 0), fields)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise HistoryError(f"line {number} is no record: {type(error).__name__} {error}") from error
    if kind not in TYPES or not isinstance(at, int) or not isinstance(wall, int) or not isinstance(record.n, int):
        raise HistoryError(f"line {number} is no record: type {kind!r}, at {at!r}, wall {wall!r}, n {record.n!r}")
    return record
