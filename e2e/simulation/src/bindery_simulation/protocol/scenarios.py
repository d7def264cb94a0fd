"""Play known defects of BookKeeper as scripts that deliver messages in the order that reveals the defect.

| scenario | defect                                                                                                  |
|----------|---------------------------------------------------------------------------------------------------------|
| bk2614   | recovery reads that do not fence: a bookie denies an entry to the recovery, then acknowledges it        |
| bk2615   | recovery from -1: bookies of a new last ensemble have no LAC, and a change below it cannot be published |
| bk4651   | acks during an ensemble change confirm entries on bookies that the metadata no longer names             |

Each script is played twice: without the defect, every invariant holds; with the defect, one invariant is violated. The
traces are golden files.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId

from bindery_simulation.protocol.clients import Recoverer, Writer
from bindery_simulation.protocol.endpoint import Message
from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.mutants import MUTANTS
from bindery_simulation.protocol.sequence_chart import SequenceChart, describe
from bindery_simulation.protocol.world import World

STEPS_MAX = 2_000
"""Maximum number of steps of `Stage.rest`."""


class Stage:
    """A world in which a script delivers the messages."""

    def __init__(self, *, bookies: int, ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
        self.chart = SequenceChart()
        self.world = World(
            Random(1),
            bookie_count=bookies,
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            chart=self.chart,
        )
        self.writer = Writer(self.world)

    def say(self, text: str) -> None:
        """Add a comment to the trace."""
        self.chart.lines.append(f"# {text}")

    def add(self, *payloads: bytes) -> None:
        self.writer.add(payloads)

    def recover(self, name: str = "recovery") -> Recoverer:
        recoverer = Recoverer(self.world, name, entries_in_flight_max=1)
        recoverer.start()
        return recoverer

    def deliver(self, pattern: str) -> int:
        """Deliver all messages that match `pattern`, a regular expression for `from -> to what`.

        Return the number of messages. At least one message must match.
        """
        taken = self._taken(pattern)
        for message in taken:
            self.world.arrive(message)
        return len(taken)

    def drop(self, pattern: str) -> None:
        """Lose all messages that match, without an error for their senders. At least one must match."""
        for message in self._taken(pattern):
            self.chart.vanished(self.world, message, "lost")

    def lose_answer(self, pattern: str) -> None:
        """Execute a metadata write and lose its answer, so that its client must read again."""
        (message,) = self._taken(pattern)
        _, client, _, job, (planned, version) = message
        self.say(f"{client.name}'s compare-and-set at v{version} is done, but the answer to it gets lost.")
        assert self.world.ledger.compare_and_set(planned, version)
        self.world.update(client, job)

    def metadata(self, name: str) -> None:
        """Deliver all messages between `name` and the metadata."""
        while self._matching(pattern := f"{name} -> metadata|metadata -> {name}"):
            self.deliver(pattern)

    def rest(self) -> None:
        """Deliver all messages in the order of sending, and let all timeouts end."""
        for _ in range(STEPS_MAX):
            if self.world.in_flight:
                self.world.arrive(self.world.in_flight.pop(0))
            elif any(not client.is_gone and client.next_deadline() is not None for client in self.world.clients):
                self.world.pass_time()
            else:
                return
        raise Violation(Invariant.TERMINATES, "the scenario does not end")

    def _matching(self, pattern: str) -> list[Message]:
        return [m for m in self.world.in_flight if re.search(pattern, "{} -> {} {}".format(*describe(m)))]

    def _taken(self, pattern: str) -> list[Message]:
        chosen = self._matching(pattern)
        assert chosen, f"nothing in flight matches {pattern!r}"
        for message in chosen:
            self.world.in_flight.remove(message)
        return chosen


def bk2614(stage: Stage) -> None:
    """https://github.com/apache/bookkeeper/issues/2614"""
    stage.say("Entry 0 is stored by b1; the add to b0 got lost, the one to b2 is under way.")
    stage.add(b"precious")
    stage.deliver("writer -> b1")
    stage.drop("writer -> b0")
    stage.say("A recovery fences b0 and b1. That is coverage: its fence to b2 got lost.")
    recovery = stage.recover()
    stage.metadata("recovery")
    stage.deliver("recovery -> b[01] read last")
    stage.drop("recovery -> b2 read last")
    stage.deliver("-> recovery")
    stage.say("It asks all three for entry 0. b0 and b2 deny it, which is enough; b1, which has it, is not heard.")
    stage.deliver("recovery -> b[02] read 0")
    stage.drop("recovery -> b1 read 0")
    stage.deliver("-> recovery")
    stage.metadata("recovery")
    assert recovery.result is not None
    stage.say("The ledger is closed without entry 0. Now the add reaches b2.")
    stage.deliver("writer -> b2")
    stage.deliver("-> writer")
    stage.rest()


def bk2615(stage: Stage) -> None:
    """https://github.com/apache/bookkeeper/issues/2615"""
    stage.say("Entries 0 and 1 are confirmed on b0 b1 b2, then b0 and b1 fail: a second ensemble begins at 2.")
    stage.add(b"a", b"b")
    stage.deliver("writer -> b")
    stage.deliver("-> writer stored")
    stage.world.crash(BookieId("b0"))
    stage.world.crash(BookieId("b1"))
    stage.add(b"c")
    stage.deliver("writer -> b2")
    for name in ("b0", "b1"):
        stage.deliver(f"writer -> {name} add 2")
    for _ in range(2):
        stage.metadata("writer")
    segments = stage.world.ledger.metadata.segments
    assert [segment.first_entry_id for segment in segments] == [0, 2]
    newcomers = segments[-1].ensemble[:2]
    stage.say("The writer dies. A recovery hears of the two newcomers, which know nothing of this ledger.")
    stage.writer.is_gone = True
    stage.world.restart(BookieId("b0"))
    stage.world.restart(BookieId("b1"))
    stage.world.in_flight[:] = []
    recovery = stage.recover()
    stage.metadata("recovery")
    stage.drop("recovery -> b2 read last")
    stage.deliver(f"recovery -> ({'|'.join(newcomers)}) read last")
    stage.deliver("-> recovery")
    stage.say("While it goes on, a newcomer fails: whatever was to be written back there needs another place.")
    stage.world.crash(newcomers[0])
    stage.rest()
    assert recovery.result is not None
    assert recovery.result.state is LedgerState.CLOSED


def bk4651(stage: Stage) -> None:
    """https://github.com/apache/bookkeeper/issues/4651"""
    stage.say(
        "Entry 0 is confirmed; 1 and 2 are on their way to b0 and b1, slowly: the writer loses patience with both."
    )
    stage.add(b"zero")
    stage.deliver("writer -> b")
    stage.deliver("-> writer stored")
    stage.add(b"one")
    stage.add(b"two")
    stage.world.now += 11
    stage.writer.tick()
    stage.say("Both bookies are replaced from entry 1 on. Metadata says so; the writer does not know it yet.")
    stage.deliver("writer -> metadata read")
    stage.deliver("writer -> metadata compare")
    assert not {"b0", "b1"} & set(stage.world.ledger.metadata.last_segment.ensemble)
    stage.say("Now b0 and b1 store entries 1 and 2, and say so.")
    stage.deliver("writer -> b[01] add [12]")
    stage.deliver("b[01] -> writer")
    stage.say("The writer learns that its change is published: 1 and 2 must go to the bookies that it names.")
    stage.rest()


@dataclass(frozen=True)
class Scenario:
    """A script, the number of bookies and the quorums of its world, and its defect."""

    name: str
    title: str
    script: Callable[[Stage], None]
    defect: str
    """Name of the mutant in `mutants`."""
    violates: Invariant
    """The invariant that the defect violates."""
    bookies: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int

    def play(self, *, with_defect: bool) -> tuple[SequenceChart, Violation | None]:
        """Return the trace, and the violation, if any."""
        stage = Stage(
            bookies=self.bookies,
            ensemble_size=self.ensemble_size,
            write_quorum=self.write_quorum,
            ack_quorum=self.ack_quorum,
        )
        stage.say(f"{self.title}{' - with the defect: ' + self.defect if with_defect else ''}")
        stage.say(f"E={self.ensemble_size} Qw={self.write_quorum} Qa={self.ack_quorum}, {self.bookies} bookies")
        violation = None
        try:
            if with_defect:
                with MUTANTS[self.defect].applied():
                    self.script(stage)
            else:
                self.script(stage)
        except Violation as found:
            violation = found
        stage.say(f"VIOLATED {violation}" if violation is not None else "every invariant holds")
        return stage.chart, violation


SCENARIOS = (
    Scenario(
        "bk2614",
        "BookKeeper issue 2614: a recovery's reads must fence",
        bk2614,
        "recovery reads do not fence (BookKeeper issue 2614)",
        Invariant.NO_ACK_AFTER_FENCE,
        bookies=3,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
    ),
    Scenario(
        "bk2615",
        "BookKeeper issue 2615: recovery starts where the last ensemble does",
        bk2615,
        "recovery starts at -1 (BookKeeper issue 2615)",
        Invariant.SEGMENTS,
        bookies=6,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
    ),
    Scenario(
        "bk4651",
        "BookKeeper issue 4651: no ack may rest on an ensemble that metadata does not name",
        bk4651,
        "entries are confirmed before the metadata change",
        Invariant.NO_DIVERGENCE,
        bookies=4,
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
    ),
)
