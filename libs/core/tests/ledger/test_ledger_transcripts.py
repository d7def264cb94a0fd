"""Executes `transcripts/*.txt` against the ledger state machines.

A transcript is a list of blocks: comments (#), commands (one per line, or separated by ` ; `), `----`, and the output.
`REWRITE_TRANSCRIPTS=1` writes the current output into the files, for a review; the comparison then always succeeds.

| command                                                       | meaning                                            |
|---------------------------------------------------------------|----------------------------------------------------|
| create ensemble=(b0,b1) write-quorum=2 ack-quorum=1           | a writer of a new ledger                           |
| add x y                                                       | one batch of two entries                           |
| ack entry=0..1 from b0 b1                                     | these bookies stored these entries                 |
| refuse entry=0 status=FENCED from b0                          | an error response to an add (in recovery: a read)  |
| lose b0                                                       | the connection broke                               |
| spares b3 b4 / spares none                                    | replacements of failed bookies, in this order      |
| change [state=CLOSED]                                         | execute the ensemble change (on metadata like this)|
| tick +5                                                       | seconds pass                                       |
| close                                                         | the writer closes its handle                       |
| recover segment=0:(b0,b1) [segment=5:(b2,b1)] write-quorum=.. | a client recovers the ledger                       |
| begun [state=CLOSED last=3] / closed [last=3 length=4]        | the metadata step ends (CLOSED by another client)  |
| last entry=3 lac=2 from b0 / last none from b1                | responses to the fencing reads                     |
| found entry=3 lac=2 from b0 / denied entry=4 from b0 b1       | responses to reads                                 |
| read 0..2 ensemble=(b0,b1) write-quorum=2 ack-quorum=1        | a reader of a closed ledger                        |

Every payload is one byte long, so lengths follow from ids.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.errors import BinderyError, NotEnoughBookies
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import (
    BeginRecovery,
    ChangeEnsemble,
    CloseRecovered,
    Confirm,
    Degraded,
    Done,
    Fail,
    Recovered,
    SealLedger,
    SendAdds,
    SendLac,
    SendReads,
)
from bindery_core.ledger.ledger_plans import plan_ensemble_change, plan_recovery_close, replace_failed
from bindery_core.ledger.ledger_reader import LedgerRead
from bindery_core.ledger.ledger_recovery import LedgerRecovery
from bindery_core.ledger.ledger_writer import LedgerWriter
from bindery_core.wire.messages import AddResponse, ReadResponse, Status

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
LEDGER_ID = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    session = Session()
    blocks = [play(block, session) for block in re.split(r"\n{2,}", text.strip())]
    result = "\n\n".join(blocks) + "\n"
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(result)
    assert result == path.read_text()


def test_the_transcripts_are_found() -> None:
    assert len(TRANSCRIPTS) >= 8


def play(block: str, session: "Session") -> str:
    lines = block.split("\n")
    if all(line.startswith("#") for line in lines):
        return block
    assert "----" in lines, f"a block without ----: {block}"
    head = lines[: lines.index("----")]
    out: list[str] = []
    for line in head:
        if not line.startswith("#"):
            for command in line.split(" ; "):
                out += session.run(command.strip())
    return "\n".join([*head, "----", *(out or ["nothing"])])


class Session:
    """One state machine with its inputs and outputs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine: Any = None
        self.spares: list[BookieId] = []
        self.metadata: LedgerMetadata
        self.change: ChangeEnsemble | None = None
        self.closing: CloseRecovered | None = None

    def run(self, command: str) -> list[str]:
        verb, *words = command.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word and word != "from"]
        handler: Callable[[dict[str, str], list[str], str], Sequence[Any]] = getattr(self, f"do_{verb}")
        try:
            actions = handler(options, plain, command)
        except BinderyError as error:
            return [f"raises {type(error).__name__}: {error}"]
        return self.tell(actions)

    # -- commands --------------------------------------------------------------------------------------------------

    def do_create(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        self.metadata = metadata_of(options, [f"0:{options['ensemble']}"], LedgerState.OPEN)
        self.machine = LedgerWriter(LEDGER_ID, self.metadata, digester=DIGESTER)
        return []

    def do_recover(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        self.metadata = metadata_of(options, re.findall(r"segment=(\S+)", command), LedgerState.IN_RECOVERY)
        self.machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER)
        return self.machine.start(now=self.now)

    def do_read(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        self.metadata = metadata_of(options, [f"0:{options['ensemble']}"], LedgerState.OPEN)
        entry_ids = ids(plain[0])
        self.machine = LedgerRead(LEDGER_ID, self.metadata, entry_ids=entry_ids, digester=DIGESTER)
        return self.machine.start(now=self.now)

    def do_add(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        return self.machine.add_many([word.encode() for word in plain], now=self.now)

    def do_ack(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        return self.answer_adds(options, plain, Status.OK)

    def do_refuse(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        status = Status[options["status"]]
        if isinstance(self.machine, LedgerWriter):
            return self.answer_adds(options, plain, status)
        return self.answer_reads(options, plain, status)

    def do_lose(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        return [
            action
            for name in plain
            for action in self.machine.bookie_failed(BookieId(name), "connection lost", now=self.now)
        ]

    def do_spares(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        self.spares = [BookieId(name) for name in plain if name != "none"]
        return []

    def do_change(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        assert self.change is not None
        asked, self.change = self.change, None
        plan = plan_ensemble_change if asked.publish else replace_failed
        metadata = self.machine.metadata
        if "state" in options:
            metadata = metadata.with_changes(state=LedgerState[options["state"]])
        try:
            changed = plan(metadata, failed=asked.failed, first_entry_id=asked.first_entry_id, choose=self.choose)
        except BinderyError as error:
            return self.machine.ensemble_change_failed(error, now=self.now)
        assert changed is not None
        said = [f"metadata: {segments_text(changed)}"]
        return said + list(self.machine.ensemble_changed(changed, now=self.now))

    def choose(self, ensemble: Sequence[BookieId], failed: Any) -> dict[int, BookieId]:
        chosen = dict(zip(sorted(failed), list(self.spares), strict=False))
        if not chosen:
            raise NotEnoughBookies("no spare bookie")
        for spare in chosen.values():
            self.spares.remove(spare)
        return chosen

    def do_tick(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        self.now += float(plain[0])
        return self.machine.tick(now=self.now)

    def do_close(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        return self.machine.close(now=self.now)

    def do_begun(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        if "state" in options:
            self.metadata = self.metadata.with_changes(
                state=LedgerState[options["state"]], last_entry_id=int(options["last"])
            )
        return self.machine.recovery_begun(self.metadata, now=self.now)

    def do_closed(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        assert self.closing is not None
        asked = self.closing
        read = self.metadata
        if "last" in options:
            read = read.with_changes(
                state=LedgerState.CLOSED, last_entry_id=int(options["last"]), length=int(options["length"])
            )
        planned = plan_recovery_close(
            read,
            began=asked.began,
            recovered=asked.recovered,
            last_entry_id=asked.last_entry_id,
            length=asked.length,
        )
        return self.machine.recovery_closed(planned or read, now=self.now)

    def do_last(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        if plain[0] == "none":
            answer = ReadResponse(0, Status.NO_ENTRY, LEDGER_ID, -1)
            plain = plain[1:]
        else:
            answer = ReadResponse(0, Status.OK, LEDGER_ID, -1, frame(int(options["entry"]), int(options["lac"])))
        return [
            action for name in plain for action in self.machine.receive_reads(BookieId(name), [answer], now=self.now)
        ]

    def do_found(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        return self.answer_reads(options, plain, Status.OK)

    def do_denied(self, options: dict[str, str], plain: list[str], command: str) -> Sequence[Any]:
        return self.answer_reads(options, plain, Status.NO_ENTRY)

    def answer_adds(self, options: dict[str, str], names: list[str], status: Status) -> Sequence[Any]:
        answers = [AddResponse(0, status, LEDGER_ID, entry_id) for entry_id in ids(options["entry"])]
        receive = self.machine.receive_many if isinstance(self.machine, LedgerWriter) else self.machine.receive_adds
        return [action for name in names for action in receive(BookieId(name), answers, now=self.now)]

    def answer_reads(self, options: dict[str, str], names: list[str], status: Status) -> Sequence[Any]:
        lac = int(options.get("lac", -1))
        answers = [
            ReadResponse(0, status, LEDGER_ID, entry_id, frame(entry_id, lac) if status == Status.OK else None)
            for entry_id in ids(options["entry"])
        ]
        receive = self.machine.receive_many if isinstance(self.machine, LedgerRead) else self.machine.receive_reads
        return [action for name in names for action in receive(BookieId(name), answers, now=self.now)]

    # -- output ----------------------------------------------------------------------------------------------------

    def tell(self, actions: Sequence[Any]) -> list[str]:
        lines: list[str] = []
        for action in actions:
            line = action if isinstance(action, str) else self.line(action)
            head, separator, bookie = line.rpartition(" to ")
            if separator and lines and lines[-1].startswith(head + separator):
                lines[-1] += f" {bookie}"
            else:
                lines.append(line)
        if isinstance(self.machine, LedgerWriter) and self.machine.error is None:
            lines += self.waiting()
        return lines

    def waiting(self) -> list[str]:
        writer: LedgerWriter = self.machine
        quorum = writer.metadata.ack_quorum
        first = writer.lac + 1
        acks = writer._acks.acks[first - writer._acks.base :]
        complete = [first + i for i, members in enumerate(acks) if members.bit_count() >= quorum]
        if not complete:
            return []
        why = "an ensemble change" if writer.is_changing else f"entry {first}"
        return [f"entry {text(complete)} has its ack quorum, waits for {why} (lac={writer.lac})"]

    def line(self, action: Any) -> str:
        match action:
            case SendAdds(bookie_id, entry_ids, _, recovery):
                return f"{'recovery add' if recovery else 'send'} entry={text(entry_ids)} to {bookie_id}"
            case SendReads(bookie_id, entry_ids, fence):
                what = "last" if tuple(entry_ids) == (-1,) else f"entry={text(entry_ids)}"
                return f"{'fence and ' if fence else ''}read {what} to {bookie_id}"
            case SendLac(bookie_ids, lac):
                return f"send lac={lac} to {' '.join(bookie_ids)}"
            case ChangeEnsemble(failed, first_entry_id, publish):
                self.change = action
                where = "" if publish else " in memory"
                return f"change ensemble{where} from entry {first_entry_id}: replace {' '.join(failed.values())}"
            case Confirm(first, last):
                return f"confirm {first}..{last} (lac={last})"
            case Degraded(bookie_id, first_entry_id, reason):
                return f"degraded: {bookie_id} may lack entries from {first_entry_id} on ({reason})"
            case SealLedger(last_entry_id, length):
                return f"seal: last entry {last_entry_id}, length {length}"
            case BeginRecovery():
                return "begin recovery"
            case CloseRecovered(_, recovered, last_entry_id, length):
                self.closing = action
                segments = " ".join(f"{s.first_entry_id}:({','.join(s.ensemble)})" for s in recovered)
                return f"close: last entry {last_entry_id}, length {length}, ensembles {segments}"
            case Recovered(metadata):
                return f"recovered: last entry {metadata.last_entry_id}, length {metadata.length}"
            case Done():
                return f"done: entries {text([entry.entry_id for entry in self.machine.take_entries()])}"
            case Fail(error):
                return f"fail: {type(error).__name__}: {error}"
        raise AssertionError(action)


def metadata_of(options: dict[str, str], segments: list[str], state: LedgerState) -> LedgerMetadata:
    parsed = []
    for segment in segments:
        first, _, names = segment.partition(":")
        ensemble = tuple(BookieId(name) for name in names.strip("()").split(","))
        parsed.append(Segment(EntryId(int(first)), ensemble))
    return LedgerMetadata(
        ensemble_size=len(parsed[0].ensemble),
        write_quorum=int(options["write-quorum"]),
        ack_quorum=int(options["ack-quorum"]),
        segments=tuple(parsed),
        state=state,
    )


def segments_text(metadata: LedgerMetadata) -> str:
    return " ".join(f"{s.first_entry_id}:({','.join(s.ensemble)})" for s in metadata.segments)


def frame(entry_id: int, lac: int) -> bytes:
    return pack(DIGESTER, ledger_id=LEDGER_ID, entry_id=entry_id, lac=lac, length=entry_id + 1, payload=b"x")


def ids(word: str) -> list[int]:
    first, _, last = word.partition("..")
    return list(range(int(first), int(last or first) + 1))


def text(entry_ids: Sequence[int]) -> str:
    ordered = list(entry_ids)
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}..{ordered[-1]}"
    return ",".join(map(str, ordered))
