"""Write and read the history of a run: JSON lines, appended while events happen. No other module has the format.

Each line is one object; lines are in the order of time. `at` is the runner's monotonic clock in nanoseconds, which the
validators use. `wall` is the wall clock in milliseconds, for comparison with the logs of services.

| type        | fields in addition to `at`, `wall` | meaning                                                      |
|-------------|------------------------------------|--------------------------------------------------------------|
| run         | facts of the run                   | first line: command, seed, commit, images; `version` of this |
| invoke      | n, op, process, operation's own    | a client is about to send a request; n counts from 1         |
| ok          | n, operation's own                 | a response confirms that the operation was done              |
| failed      | n, error                           | a response, or nothing was sent: it was *not* done           |
| unknown     | n, error                           | no definite response: it may have been done, or be done later|
| fault-begin | n, fault, target, fault's own      | a fault is about to be injected                              |
| fault-end   | n, outcome, fault's own            | recovered (`ok`), `failed`, or `not offered` by this cluster |
| observation | what, values                       | a check of the cluster                                       |

An operation without an end (the runner was killed) is unknown. Operations and their fields:

| op      | process  | invoke                               | ok                                                       |
|---------|----------|--------------------------------------|----------------------------------------------------------|
| produce | producer | topic; sequences, sizes, digests: a  | ids: for each a message id, or "failed" or "unknown"     |
|         |          | list each, in the request's order;   |                                                          |
|         |          | keys: a list, if messages have keys  |                                                          |
| receive | consumer | topic, subscription, kind ("shared", | messages: [id, producer, sequence, digest, redeliveries] |
|         |          | "exclusive", "failover" or           |                                                          |
|         |          | "key_shared"); with an order also    |                                                          |
|         |          | max, ack_timeout_ms, session_ttl_ms  |                                                          |
| ack     | consumer | topic, subscription, ids; or         |                                                          |
|         |          | cumulative: the last id, of an       |                                                          |
|         |          | acknowledgement of all up to it      |                                                          |
| nack    | consumer | topic, subscription, ids, delay_ms   | returned: ids of the messages that were returned         |
| leave   | consumer | topic, subscription                  |                                                          |
| read    | reader   | topic, start ("earliest" or an id),  | messages: [id, producer, sequence, digest]; end: whether |
|         |          | round                                | these are the last messages of the topic                 |

A message that the traffic did not send has producer "" and sequence -1. `round` numbers the readings of a topic from
`earliest` on; the last complete reading counts as the topic's content.

| what             | values                                                                                   |
|------------------|------------------------------------------------------------------------------------------|
| subscribed       | topic, subscription, kind: created durably before the first message was sent; order, if  |
|                  | the order of deliveries is to be judged: "key", "topic" or "none" (`delivery_order`)     |
| drained          | topic, subscription, complete: whether consumers acknowledged all messages in time       |
| under-replicated | count: ledgers that are marked as under-replicated                                       |
| ready            | ready, wanted: pods or processes                                                         |
| replicas         | compared: entries of which all replicas were read; diverged: a text for each wrong ledger|
| incomplete       | reason: a part of the run failed or was skipped; the verdict is at best INCOMPLETE       |
| note             | text                                                                                     |

| fault's own        | where | meaning                                                                               |
|--------------------|-------|---------------------------------------------------------------------------------------|
| gap_s_max          | begin | maximum seconds that a topic may be without a successful produce because of the fault |
| entries_copied_max | begin | maximum entries that recovery may copy because of the fault (0: a rolling restart)    |
| entries_copied     | end   | entries copied because of the fault; required if entries_copied_max was given         |
| bytes_copied       | end   | size of these entries in bytes                                                        |
| killed_at          | end   | `at` of a moment when the broker was dead because of the fault                        |
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
"""Maximum characters of an error in the history."""
_OUTCOMES: Final = frozenset(("ok", "failed", "not offered"))
_compact: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


class HistoryError(Exception):
    """The file is not a valid history; the message has the line and the reason."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line. `n`: 0 if the type has none. `values`: all fields except type, at, wall and n."""

    type: str
    at: int
    wall: int
    n: int
    values: Mapping[str, Any]

    @property
    def at_s(self) -> float:
        return self.at / 1e9


class Fault:
    """A fault that has begun; measured values are recorded with its end."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.outcome = "ok"
        self.values: dict[str, Any] = {}

    def measured(self, **values: Any) -> None:
        """Set `entries_copied`, `bytes_copied` or `detail`: see the tables of the module."""
        self.values.update(values)

    def not_offered(self, why: str) -> None:
        """Record that this cluster does not allow the fault. It counts neither as passed nor as failed."""
        self.outcome = "not offered"
        self.values["detail"] = why


class History:
    """Writes a history.

    Each call passes its line to the operating system before it returns, so that lines survive a crash of this process,
    but not of the machine. Nothing is kept in memory.

    For use in one thread, that of the event loop. `clock`: monotonic nanoseconds. `wall`: nanoseconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        *,
        facts: Mapping[str, Any] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """Create `path` with its first line. `facts`: command, seed, commit, images, and all else that repeats the run.

        Raises FileExistsError: a second run has another clock, so it never appends to a history.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._clock = clock
        self._wall = wall
        self._count = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._write("run", {"version": VERSION, **(facts or {})})

    # -- operations ----------------------------------------------------------------------------------------------------

    def invoke(self, op: str, process: str, **values: Any) -> int:
        """Record the begin of an operation, before its request is sent, and return the number of the operation.

        Call `ok`, `failed` or `unknown` with this number afterwards.
        """
        self._count += 1
        self._write("invoke", {"n": self._count, "op": op, "process": process, **values})
        return self._count

    def ok(self, n: int, **values: Any) -> None:
        self._write("ok", {"n": n, **values})

    def failed(self, n: int, error: str) -> None:
        self._write("failed", {"n": n, "error": error[:ERROR_LENGTH_MAX]})

    def unknown(self, n: int, error: str) -> None:
        self._write("unknown", {"n": n, "error": error[:ERROR_LENGTH_MAX]})

    # -- faults and observations ---------------------------------------------------------------------------------------

    def fault_begin(self, fault: str, target: str, **values: Any) -> int:
        self._count += 1
        self._write("fault-begin", {"n": self._count, "fault": fault, "target": target, **values})
        return self._count

    def fault_end(self, n: int, outcome: str = "ok", **values: Any) -> None:
        """Record the end of a fault. Call it when the fault is undone and the cluster has recovered from it."""
        assert outcome in _OUTCOMES, outcome
        self._write("fault-end", {"n": n, "outcome": outcome, **values})

    @contextmanager
    def fault(self, fault: str, target: str, **values: Any) -> Iterator[Fault]:
        """Record begin and end of a fault around the block. If the block raises, the outcome is `failed` with the
        error."""
        active = Fault(self.fault_begin(fault, target, **values))
        try:
            yield active
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"[:ERROR_LENGTH_MAX]
            self.fault_end(active.n, "failed", **{**active.values, "detail": detail})
            raise
        self.fault_end(active.n, active.outcome, **active.values)

    def observe(self, what: str, **values: Any) -> None:
        self._write("observation", {"what": what, **values})

    # -- closing -------------------------------------------------------------------------------------------------------

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
    """Read the records one by one. An incomplete last line (the runner was killed while it wrote) is ignored.

    Raises FileNotFoundError, and HistoryError for any other invalid content.
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
