"""Check an engine against its History, without knowledge of its files.

| name             | promise                                                                              |
|------------------|--------------------------------------------------------------------------------------|
| entries-readable | an acknowledged entry has the acknowledged bytes or those of a later add              |
| right-bytes      | the bytes read were sent for that entry, and are not older than those acknowledged    |
| nothing-invented | an entry that was never sent does not exist                                          |
| last-entry       | the last entry is at least the greatest that was acknowledged                        |
| entries-listed   | every acknowledged entry is in the ledger's list                                     |
| fences-hold      | a fenced ledger accepts no ordinary add                                              |
| keys-hold        | another master key is rejected                                                       |
| lac-holds        | the explicit LAC is the acknowledged one or a later one                              |
| starts           | the engine starts                                                                    |
| replayed-once    | after a clean stop, a start replays nothing                                          |
| space-returns    | the entry logs of deleted ledgers are removed                                         |
| answers          | every operation is answered                                                          |

After a power cut, all promises hold. After damage, the engine may refuse requests: `Finding.refused` counts answers
without a result (IO_ERROR, UNKNOWN_LEDGER_STATE, or an error), which are not problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import Corrupt, LedgerStateUnknown, NoSuchLedger, Unauthorized
from bindery_core.wire.messages import Status

from bindery_simulation.storage import calls
from bindery_simulation.storage.history import History, Key

_REFUSALS: Final = (Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE)
_ABSENT: Final = (Status.NO_ENTRY, Status.NO_LEDGER)
_FAR: Final = 50
"""Distance from the last entry id to an entry that was never sent."""
_BATCH: Final = 256
_OTHERS: Final = 100
"""Approximate number of entries to read that were sent but not acknowledged."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken promise."""

    name: str
    key: Key | None
    """(ledger id, entry id). Entry id -1: the ledger as a whole; None: the engine."""
    text: str

    def __str__(self) -> str:
        where = (
            "" if self.key is None else f" ledger {self.key[0]}" + (f" entry {self.key[1]}" if self.key[1] >= 0 else "")
        )
        return f"{self.name}:{where} {self.text}"


class Violation(AssertionError):
    """Raised with a Problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem

    def __reduce__(self) -> tuple[type["Violation"], tuple[Problem]]:
        """Pickle the arguments of the constructor: a search with several processes sends violations between them."""
        return Violation, (self.problem,)


@dataclass(slots=True)
class Finding:
    """The answers of an engine."""

    problems: list[Problem] = field(default_factory=list)
    refused: int = 0
    right: int = 0
    """Number of acknowledged entries that were read correctly."""
    first_refusal: str | None = None

    def refuse(self, key: Key, text: str) -> None:
        self.refused += 1
        if self.first_refusal is None:
            self.first_refusal = f"ledger {key[0]} entry {key[1]} {text}"


def check_entry(sent: Sequence[bytes], key: Key, floor: int, is_promised: bool, found: bytes | int) -> Problem | None:
    """Check an answer. `floor`: number of the oldest permitted body. `is_promised`: the entry must exist."""
    if isinstance(found, int):
        if is_promised:
            return Problem("entries-readable", key, f"was acknowledged and answers {Status(found).name}")
        return None if found in _ABSENT else Problem("entries-readable", key, f"answers {Status(found).name}")
    if found in sent[max(floor, 0) :]:
        return None
    if found in sent:
        return Problem(
            "right-bytes", key, f"is body {sent.index(found)}; {max(floor, 0)} is the oldest that may be there"
        )
    return Problem("right-bytes", key, "is none that was sent")


async def check_engine(engine: Any, history: History, *, may_be_old: bool = False) -> Finding:
    """Read and check everything. The checks also send adds, which the engine must reject.

    An add that it accepts nevertheless is a problem and is recorded in `history`: the entry exists from then on.

    `may_be_old`: permit any body of an entry that was written several times. A store that lost one part serves the
    older bodies of the other part. This is harmless, because clients write an entry again only with the same bytes.
    """
    finding = Finding()
    keys = [key for key in history.sent if key in history.acknowledged]
    others = [key for key in history.sent if key not in history.acknowledged]
    keys += others[:: len(others) // _OTHERS + 1]
    for at in range(0, len(keys), _BATCH):
        batch = keys[at : at + _BATCH]
        for key, found in zip(batch, await calls.read(engine, batch), strict=True):
            if isinstance(found, int) and found in _REFUSALS:
                finding.refuse(key, Status(found).name)
                continue
            promised = history.acknowledged.get(key, -1)
            floor = 0 if may_be_old else max(promised, history.hidden.get(key, 0))
            problem = check_entry(history.sent[key], key, floor, promised >= 0, found)
            if problem is not None:
                finding.problems.append(problem)
            elif promised >= 0:
                finding.right += 1
    for ledger_id in history.ledger_ids():
        await _check_ledger(engine, history, ledger_id, finding)
    return finding


async def _check_ledger(engine: Any, history: History, ledger_id: int, finding: Finding) -> None:
    whole = (ledger_id, -1)
    promised = [key[1] for key in history.acknowledged if key[0] == ledger_id]
    never_sent = history.next_id.get(ledger_id, 0) + _FAR
    invented, last = await calls.read(engine, [(ledger_id, never_sent), whole])
    if isinstance(invented, bytes):
        finding.problems.append(Problem("nothing-invented", (ledger_id, never_sent), "was never sent"))
    if isinstance(last, int) and last in _REFUSALS:
        finding.refuse(whole, Status(last).name)
    elif promised and (isinstance(last, int) or calls.entry_id_of(last) < max(promised)):
        text = Status(last).name if isinstance(last, int) else f"is {calls.entry_id_of(last)}"
        finding.problems.append(Problem("last-entry", whole, f"{text} but {max(promised)} was acknowledged"))
    elif isinstance(last, bytes) and last not in history.sent.get((ledger_id, calls.entry_id_of(last)), ()):
        finding.problems.append(Problem("right-bytes", whole, "its last entry is none that was sent"))
    if promised:
        await _check_list(engine, ledger_id, set(promised), finding)
    if ledger_id in history.lac_acknowledged:
        await _check_lac(engine, history, ledger_id, finding)
    if ledger_id in history.fenced:
        intruder = calls.entry(ledger_id, never_sent, b"intruder")
        (status,) = await calls.add(engine, [calls.add_request(intruder)])
        if status == Status.OK:
            history.acknowledge((ledger_id, never_sent), history.send((ledger_id, never_sent), intruder))
        if status in _REFUSALS:
            finding.refuse(whole, Status(status).name)
        elif status != Status.FENCED:
            finding.problems.append(Problem("fences-hold", whole, f"an ordinary add answers {Status(status).name}"))
    if ledger_id in history.keyed:
        await _check_key(engine, ledger_id, finding)


async def _check_list(engine: Any, ledger_id: int, promised: set[int], finding: Finding) -> None:
    try:
        runs = await engine.entry_ids(ledger_id)
    except (Corrupt, LedgerStateUnknown, OSError) as error:
        finding.refuse((ledger_id, -1), str(error))
        return
    except NoSuchLedger:
        runs = []
    listed = {entry_id for first, count in runs for entry_id in range(first, first + count)}
    if missing := sorted(promised - listed):
        finding.problems.append(Problem("entries-listed", (ledger_id, missing[0]), f"is not listed, of {len(missing)}"))


async def _check_lac(engine: Any, history: History, ledger_id: int, finding: Finding) -> None:
    try:
        packet = (await engine.read_lac(ledger_id)).explicit_packet
    except (Corrupt, LedgerStateUnknown, OSError) as error:
        finding.refuse((ledger_id, -1), str(error))
        return
    except NoSuchLedger:
        packet = None
    if packet not in history.lac_packets[ledger_id][history.lac_acknowledged[ledger_id] :]:
        finding.problems.append(Problem("lac-holds", (ledger_id, -1), f"its explicit LAC packet is {packet!r}"))


async def _check_key(engine: Any, ledger_id: int, finding: Finding) -> None:
    try:
        await engine.fence(ledger_id, b"another key" + bytes(9))
    except Unauthorized:
        return
    except (Corrupt, LedgerStateUnknown, OSError) as error:
        finding.refuse((ledger_id, -1), str(error))
        return
    finding.problems.append(Problem("keys-hold", (ledger_id, -1), "another master key may fence"))
