"""Play one history: opening, random events of a profile, end of all faults, liveness, verdict.

The seed determines the history.
"""

from dataclasses import dataclass
from random import Random

from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ledger.ledger_actions import Done, Fail, SendReads
from bindery_core.ledger.ledger_reader import LedgerRead
from bindery_core.ledger.ledger_writer import WriterSettings
from bindery_core.wire.messages import ReadResponse

from bindery_simulation.protocol.clients import Recoverer, Writer
from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.ledger import LEDGER_ID
from bindery_simulation.protocol.maintenance import Deleter, Replicator
from bindery_simulation.protocol.profiles import Profile, draw_profile
from bindery_simulation.protocol.readers import Reader
from bindery_simulation.protocol.sequence_chart import SequenceChart
from bindery_simulation.protocol.world import DIGESTER, World

ENTRIES_MAX = 12
"""Number of entries after which no more entries are added."""
RECOVERIES_MAX = 4
"""Maximum number of recoveries before the end of all faults."""
READERS_MAX = 3
"""Maximum number of readers."""
SETTLE_STEPS_MAX = 20_000
"""Maximum number of steps until all messages are delivered and all timeouts have ended."""
ATTEMPTS_MAX = 8
"""Maximum number of final recoveries, and of final replications. If none succeeds, the history is a violation."""


@dataclass(frozen=True)
class Outcome:
    """The result of a history. `violation` is None if every invariant held."""

    seed: int
    profile: str
    violation: Violation | None
    reach: dict[str, int]
    chart: SequenceChart | None
    title: str


def play(seed: int, *, profile: str | None = None, trace: bool = False) -> Outcome:
    """Play the history of `seed`. Equal arguments give equal histories.

    `profile`: name of the profile; None: a random profile.
    """
    history = History(Random(seed), profile=profile, chart=SequenceChart() if trace else None)
    violation = None
    try:
        history.run()
    except Violation as found:
        violation = found
    except AssertionError as error:
        violation = Violation(Invariant.MACHINE, str(error) or _where(error))
        violation.__cause__ = error
    return Outcome(seed, history.profile.name, violation, history.world.reach, history.world.chart, history.title)


def _where(error: AssertionError) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    assert place is not None
    return f"in {place.tb_frame.f_code.co_name}"


class History:
    """The world, its clients, and their events."""

    def __init__(self, rng: Random, *, profile: str | None = None, chart: SequenceChart | None = None) -> None:
        self.profile: Profile = draw_profile(rng, profile)
        plan = self.profile
        self.rng = rng
        self.draw = rng.random
        ensemble_size, write_quorum, ack_quorum = rng.choice(plan.quorums)
        spares = rng.choice(plan.spares)
        self.title = f"{plan.name}: E={ensemble_size} Qw={write_quorum} Qa={ack_quorum}, {spares} spare"
        self.world = world = World(
            rng,
            bookie_count=ensemble_size + spares,
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            chart=chart,
        )
        world.loss, world.duplication, world.refusal = plan.loss, plan.duplication, plan.refusal
        world.fence_loss, world.unknown, world.splitting = plan.fence_loss, plan.unknown, 0.3
        world.has_slow_links = plan.slow > 0
        names = list(world.names)
        rng.shuffle(names)
        self.damageable = names[: ack_quorum - 1]
        """Bookies that may be lost or lose data: fewer than Qa, so that an intact replica of each entry remains."""
        self.has_lost_a_bookie = False
        self.recoverers: list[Recoverer] = []
        self.readers: list[Reader] = []
        self.replicators: list[Replicator] = []
        self.deleter: Deleter | None = None
        self.writer = Writer(
            world,
            settings=WriterSettings(
                explicit_lac_idle_s=0.1 if plan.name in ("tail", "anything") else None, replacement_retry_s=5.0
            ),
        )
        self._slow_links(self.writer)
        self._events = {
            "add": self._add,
            "crash": self._crash,
            "two crash": self._crash_two,
            "restart": self._restart,
            "recover": self._recover,
            "kill recovery": self._kill_recovery,
            "kill writer": self._kill_writer,
            "close": self.writer.close,
            "lose storage": self._lose_storage,
            "rot": self._rot,
            "lose bookie": self._lose_bookie,
            "read": self._read,
            "replicate": self._replicate,
            "delete": self._delete,
            "cut": self._cut,
            "heal": self._heal_links,
            "metadata cut": self._metadata_cut,
            "time": world.pass_time,
            "rest": self._rest,
        }

    def run(self) -> None:
        """Play the history. Raises Violation."""
        plan, world, events, draw = self.profile, self.world, self._events, self.draw
        for name in plan.opening:
            events[name]()
        bag, rate, early_timeout, size = plan.bag, plan.event_rate, plan.early_timeout, len(plan.bag)
        step = world.step
        for _ in range(plan.steps):
            if draw() < rate:
                events[bag[int(draw() * size)]]()
            step(early_timeout)
        self._heal()
        self._finish()

    # -- events ----------------------------------------------------------------------------------------------------

    def _slow_links(self, client: "Writer | Recoverer | Reader | Replicator | Deleter") -> None:
        if self.profile.slow:
            for name in self.world.names:
                if self.draw() < self.profile.slow:
                    client.slow.add(name)

    def _add(self) -> None:
        if len(self.world.ledger.payloads) < ENTRIES_MAX:
            count = 1 + int(self.draw() * 3)
            draw = self.draw
            self.writer.add(tuple(bytes((int(draw() * 256),)) * int(draw() * 4) for _ in range(count)))

    def _any_bookie(self, *, is_up: bool) -> str | None:
        names = [name for name, bookie in self.world.bookies.items() if bookie.is_up is is_up]
        return names[int(self.draw() * len(names))] if names else None

    def _crash(self) -> None:
        name = self._any_bookie(is_up=True)
        if name is not None:
            self.world.crash(name)  # type: ignore[arg-type]

    def _crash_two(self) -> None:
        self._crash()
        self._crash()

    def _restart(self) -> None:
        name = self._any_bookie(is_up=False)
        if name is not None:
            self.world.restart(name)  # type: ignore[arg-type]

    def _recover(self) -> None:
        if len(self.recoverers) < RECOVERIES_MAX:
            self._new_recoverer()

    def _new_recoverer(self) -> Recoverer:
        name = f"recovery{len(self.recoverers)}"
        recoverer = Recoverer(self.world, name, entries_in_flight_max=(1, 1, 2, 4)[int(self.draw() * 4)])
        self.recoverers.append(recoverer)
        self._slow_links(recoverer)
        recoverer.start()
        return recoverer

    def _kill_recovery(self) -> None:
        busy = [recoverer for recoverer in self.recoverers if recoverer.is_busy]
        if busy:
            dead = busy[int(self.draw() * len(busy))]
            dead.is_gone = True
            self.world.count("recoveries killed")
            self.world.note(f"{dead.name} dies")

    def _kill_writer(self) -> None:
        if not self.writer.is_gone:
            self.writer.is_gone = True
            self.world.count("writers killed")
            self.world.note("writer dies")

    def _lose_storage(self) -> None:
        if self.damageable:
            self.world.lose_storage(self.damageable[int(self.draw() * len(self.damageable))])

    def _rot(self) -> None:
        if not self.damageable:
            return
        bookie = self.world.bookies[self.damageable[int(self.draw() * len(self.damageable))]]
        healthy = [entry_id for entry_id in bookie.entries if entry_id not in bookie.rotten]
        if healthy:
            entry_id = healthy[int(self.draw() * len(healthy))]
            bookie.rot(entry_id)
            self.world.ledger.set_mark()
            self.world.count("rot")
            self.world.note(f"entry {entry_id} rots at {bookie.bookie_id}")

    def _lose_bookie(self) -> None:
        """Lose a bookie and its disk permanently, at most one per history."""
        metadata = self.world.ledger.metadata
        is_replaceable = metadata.write_quorum > metadata.ack_quorum or len(self.world.names) > metadata.ensemble_size
        if self.damageable and is_replaceable and not self.has_lost_a_bookie:
            self.has_lost_a_bookie = True
            name = self.damageable[0]
            if self.world.bookies[name].is_up:
                self.world.crash(name)
            self.world.bookies[name].is_lost = True
            self.world.ledger.set_mark()
            self.world.count("bookies lost for good")
            self.world.note(f"{name} is gone for good")

    def _read(self) -> None:
        if len(self.readers) < READERS_MAX:
            reader = Reader(self.world, f"reader{len(self.readers)}", rounds=1 + int(self.draw() * 4))
            self.readers.append(reader)
            self._slow_links(reader)
            reader.start()

    def _replicate(self) -> None:
        if not any(replicator.is_busy for replicator in self.replicators[-2:]) and len(self.replicators) < 6:
            self._new_replicator()

    def _new_replicator(self) -> Replicator:
        replicator = Replicator(self.world, f"worker{len(self.replicators)}")
        self.replicators.append(replicator)
        self._slow_links(replicator)
        self.world.count("replications")
        replicator.start()
        return replicator

    def _delete(self) -> None:
        if self.deleter is None:
            self.deleter = Deleter(self.world, "deleter")
            self._slow_links(self.deleter)
            self.deleter.start()

    def _cut(self) -> None:
        """Cut the link between a client and a bookie, in one or both directions."""
        client = self.world.clients[int(self.draw() * len(self.world.clients))]
        name = self.world.names[int(self.draw() * len(self.world.names))]
        way = int(self.draw() * 3)
        if way != 1:
            client.cuts.add((True, name))
        if way != 2:
            client.cuts.add((False, name))
        self.world.count("links cut")
        self.world.note(f"{client.name} and {name} are cut off ({('both ways', 'answers only', 'requests only')[way]})")

    def _heal_links(self) -> None:
        for client in self.world.clients:
            client.cuts.clear()
            client.is_cut_off = False

    def _metadata_cut(self) -> None:
        client = self.world.clients[int(self.draw() * len(self.world.clients))]
        client.is_cut_off = not client.is_cut_off
        self.world.note(f"{client.name} {'loses' if client.is_cut_off else 'has'} its connection to metadata")

    def _rest(self) -> None:
        """Deliver all messages without loss, refusals or unknown outcomes."""
        world = self.world
        kept = world.loss, world.refusal, world.unknown
        world.loss = world.refusal = world.unknown = 0.0
        if not world.settle(steps=SETTLE_STEPS_MAX):
            raise Violation(Invariant.TERMINATES, "a history without faults does not come to rest")
        world.loss, world.refusal, world.unknown = kept

    # -- the end ---------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        world = self.world
        world.note("all faults are over")
        world.loss = world.duplication = world.refusal = world.fence_loss = world.unknown = 0.0
        self._heal_links()
        for name, bookie in world.bookies.items():
            if not bookie.is_up:
                world.restart(name)

    def _finish(self) -> None:
        """Check that operations end, the ledger is closed, and the mark is removed. Then read all entries."""
        world, ledger = self.world, self.world.ledger
        if self.draw() < 0.3:
            self._kill_writer()
        elif self.draw() < 0.3:
            self.writer.close()
        for attempt in range(ATTEMPTS_MAX):
            if not ledger.is_deleted and ledger.metadata.state is not LedgerState.CLOSED:
                self._new_recoverer()
            elif attempt:
                break
            if not world.settle(steps=SETTLE_STEPS_MAX):
                raise Violation(Invariant.TERMINATES, "messages and timeouts do not end after all faults")
        if ledger.is_deleted:
            world.count("ended deleted")
            self._add_late()
            return
        if ledger.metadata.state is not LedgerState.CLOSED:
            raise Violation(Invariant.TERMINATES, f"no recovery closes the ledger: {self.recoverers[-1].failure}")
        for _ in range(ATTEMPTS_MAX):
            if ledger.mark is None:
                break
            world.settle(steps=SETTLE_STEPS_MAX)
            last = self._new_replicator()
            world.settle(steps=SETTLE_STEPS_MAX)
        if ledger.mark is not None and self._can_repair():
            raise Violation(Invariant.TERMINATES, f"no repair removes the mark: {last.failure}")
        self._verdict()
        self._add_late()
        self._verdict()
        world.count(f"segments {min(len(ledger.metadata.segments), 4)}")
        if ledger.metadata.last_entry_id > ledger.confirmed:
            world.count("kept unacknowledged entries")

    def _can_repair(self) -> bool:
        """Return whether enough bookies remain to fill an ensemble."""
        there = sum(not bookie.is_lost for bookie in self.world.bookies.values())
        return there >= self.world.ledger.metadata.ensemble_size

    def _add_late(self) -> None:
        """Add one more entry if the writer still runs. The entry must not be confirmed."""
        self.writer.add((b"late",))
        if not self.world.settle(steps=SETTLE_STEPS_MAX):
            raise Violation(Invariant.TERMINATES, "a late add does not end")

    def _verdict(self) -> None:
        """Check that every entry of the closed ledger can be read and is correct."""
        ledger = self.world.ledger
        last = ledger.metadata.last_entry_id
        if last < 0:
            return
        read = LedgerRead(LEDGER_ID, ledger.metadata, entry_ids=range(last + 1), digester=DIGESTER)
        pending = read.start(now=0.0)
        while pending:
            action = pending.pop()
            if type(action) is SendReads:
                bookie = self.world.bookies[action.bookie_id]
                if not bookie.is_up:
                    pending += read.bookie_failed(action.bookie_id, "not there", now=0.0)
                    continue
                answers = [ReadResponse(0, *_answer(bookie.read(e), e)) for e in action.entry_ids]
                pending += read.receive_many(action.bookie_id, answers, now=0.0)
            elif type(action) is Fail:
                raise Violation(Invariant.READABLE, f"the closed ledger cannot be read: {action.error}")
            else:
                assert type(action) is Done
        for entry in read.take_entries():
            ledger.was_read(entry, "verdict")


def _answer(found: tuple[int, bytes | None], entry_id: int) -> tuple[int, int, int, bytes | None]:
    return found[0], LEDGER_ID, entry_id, found[1]
