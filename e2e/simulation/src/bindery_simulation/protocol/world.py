"""Deliver the messages between clients, bookies and the metadata node, and advance time.

Each step delivers one message in flight, chosen at random. Messages therefore arrive in any order, unlike on a real
connection. Messages are lost (the sender gets an error, or its timeout ends), duplicated, or delayed on slow links.
Links are cut and healed; bookies crash and restart. Time advances only if nothing is in flight, or if a step lets a
timeout end.

If the outcome of a metadata write is unknown, the write was executed or not. Its client reads again *after* an executed
write took effect, because the metadata store syncs first.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from bindery_core.digest import Digester
from bindery_core.errors import BinderyError, MetadataOutcomeUnknown, NoSuchLedger
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.ledger.ledger_actions import SendAdds, SendReads
from bindery_core.placement.placement import Candidate, choose_replacements
from bindery_core.wire.messages import AddResponse, ReadLacResponse, ReadResponse, Status

from bindery_simulation.protocol.bookie import OK, UNKNOWN, Bookie
from bindery_simulation.protocol.endpoint import Endpoint, Message
from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.ledger import LEDGER_ID, Ledger
from bindery_simulation.protocol.sequence_chart import SequenceChart

Plan = Callable[[LedgerMetadata], LedgerMetadata | None]
"""Returns the changed metadata; None: nothing to change."""
Job = tuple[Plan, Callable[[LedgerMetadata], None], Callable[[BinderyError], None]]
"""A metadata update loop in progress: plan, callback after success, callback after failure."""

REFUSALS = tuple(
    int(status) for status in (Status.IO_ERROR, Status.READ_ONLY, Status.TOO_MANY_REQUESTS, Status.UNKNOWN_LEDGER_STATE)
)
DIGESTER = Digester(DigestType.CRC32C)


class World:
    """Messages, bookies, the ledger and time.

    Every random decision uses `rng`, so that a seed determines the history, with or without a trace.
    An attribute that is a probability applies to each message of its kind.
    """

    def __init__(
        self,
        rng: Random,
        *,
        bookie_count: int,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        chart: SequenceChart | None = None,
    ) -> None:
        self.rng = rng
        self.draw = rng.random
        self.now = 0.0
        self.in_flight: list[Message] = []
        self.clients: list[Endpoint] = []
        self.names = [BookieId(f"b{i}") for i in range(bookie_count)]
        self.bookies = {name: Bookie(name) for name in self.names}
        self.ledger = Ledger(
            LedgerMetadata(
                ensemble_size=ensemble_size,
                write_quorum=write_quorum,
                ack_quorum=ack_quorum,
                segments=(Segment(EntryId(0), tuple(self.names[:ensemble_size])),),
            ),
            self.bookies,
        )
        self.chart = chart
        self.reach: dict[str, int] = {}
        self.loss = 0.0
        self.duplication = 0.0
        self.splitting = 0.0
        """Probability that a batch of adds arrives in two parts."""
        self.refusal = 0.0
        self.fence_loss = 0.0
        """Probability that the first fence of a recovery never arrives."""
        self.unknown = 0.0
        """Probability that the answer to a metadata write is lost."""
        self.has_slow_links = False

    def count(self, what: str) -> None:
        self.reach[what] = self.reach.get(what, 0) + 1

    # -- in flight -------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Send a request to a bookie, or the answer to a request."""
        client, bookie_id = message[1], message[2]
        if client.cuts and (message[0].__name__.startswith("to_"), bookie_id) in client.cuts:
            self._lose(message, "cut off")
            return
        if self.loss and self.draw() < self.loss:
            self._lose(message, "lost")
            return
        self.in_flight.append(message)
        if self.duplication and self.draw() < self.duplication:
            self.in_flight.append(message)

    def _lose(self, message: Message, why: str) -> None:
        if self.chart is not None:
            self.chart.vanished(self, message, why)
        if self.draw() < 0.5:
            self.in_flight.append((self.lost, message[1], message[2], None, None))

    def step(self, early_timeout: float = 0.0) -> None:
        """Deliver one message. With probability `early_timeout`, or if none is in flight, let a timeout end instead."""
        in_flight = self.in_flight
        count = len(in_flight)
        if not count or (early_timeout and self.draw() < early_timeout):
            self.pass_time()
            return
        index = int(self.draw() * count)
        message = in_flight[index]
        if self.has_slow_links:
            for _ in range(6):
                if message[2] not in message[1].slow:
                    break
                index = int(self.draw() * count)
                message = in_flight[index]
        in_flight[index] = in_flight[-1]
        in_flight.pop()
        self.arrive(message)

    def arrive(self, message: Message) -> None:
        if self.chart is None:
            message[0](message)
        else:
            self.chart.play(self, message)

    def pass_time(self) -> None:
        """Advance to just after the next deadline of a client."""
        nearest = None
        for client in self.clients:
            if not client.is_gone:
                deadline = client.next_deadline()
                if deadline is not None and (nearest is None or deadline < nearest):
                    nearest = deadline
        self.now = max(self.now, nearest or 0.0) + 0.001
        for client in list(self.clients):
            if not client.is_gone:
                deadline = client.next_deadline()
                if deadline is not None and deadline <= self.now:
                    client.tick()

    def settle(self, *, steps: int) -> bool:
        """Deliver all messages and let all timeouts end. Return False if not done after `steps` steps."""
        for _ in range(steps):
            if not self.in_flight and all(client.is_gone or client.next_deadline() is None for client in self.clients):
                return True
            self.step()
        return False

    # -- faults ----------------------------------------------------------------------------------------------------

    def crash(self, bookie_id: BookieId) -> None:
        """Stop a bookie. Requests in flight to it are lost; its answers in flight may still arrive."""
        bookie = self.bookies[bookie_id]
        bookie.is_up = False
        self.count("crashes")
        kept: list[Message] = []
        for message in self.in_flight:
            if message[2] == bookie_id and message[0].__name__.startswith("to_"):
                if self.draw() < 0.5:
                    kept.append((self.lost, message[1], bookie_id, None, None))
            else:
                kept.append(message)
        self.in_flight[:] = kept
        self.note(f"{bookie_id} crashes")

    def restart(self, bookie_id: BookieId) -> None:
        if not self.bookies[bookie_id].is_lost:
            self.bookies[bookie_id].restart()
            self.note(f"{bookie_id} is back")

    def lose_storage(self, bookie_id: BookieId) -> None:
        """Stop a bookie and start it with an empty disk."""
        bookie = self.bookies[bookie_id]
        if bookie.is_lost:
            return
        self.crash(bookie_id)
        listed = any(bookie_id in segment.ensemble for segment in self.ledger.metadata.segments)
        bookie.lose_storage(is_listed=listed and not self.ledger.is_deleted)
        if listed:
            self.ledger.set_mark()
            self.count("limbo")
        self.note(f"{bookie_id} is back with an empty disk")

    def note(self, text: str) -> None:
        if self.chart is not None:
            self.chart.note(self, text)

    # -- adds ------------------------------------------------------------------------------------------------------

    def send_adds(self, client: Endpoint, action: SendAdds) -> None:
        ids, frames = action.entry_ids, action.frames
        if len(ids) > 1 and self.splitting and self.draw() < self.splitting:
            cut = 1 + int(self.draw() * (len(ids) - 1))
            self.post((self.to_add, client, action.bookie_id, (ids[:cut], frames[:cut]), action.recovery))
            ids, frames = ids[cut:], frames[cut:]
        self.post((self.to_add, client, action.bookie_id, (ids, frames), action.recovery))

    def to_add(self, message: Message) -> None:
        _, client, bookie_id, (ids, frames), recovery = message
        bookie = self.bookies[bookie_id]
        if not bookie.is_up:
            self.lost(message)
            return
        answers = []
        for entry_id, frame in zip(ids, frames, strict=True):
            if self.refusal and self.draw() < self.refusal:
                status = REFUSALS[int(self.draw() * len(REFUSALS))]
            else:
                status = bookie.add(entry_id, frame, recovery=recovery)
                if status == OK:
                    self.ledger.stored(bookie, entry_id, frame, recovery=recovery)
            answers.append(AddResponse(0, status, LEDGER_ID, entry_id))
        self.post((self.from_add, client, bookie_id, answers, None))

    def from_add(self, message: Message) -> None:
        client = message[1]
        if not client.is_gone:
            client.receive_adds(message[2], message[3])

    # -- reads -----------------------------------------------------------------------------------------------------

    def send_reads(self, client: Endpoint, action: SendReads) -> None:
        bookie_id, how = action.bookie_id, (action.fence, client.epoch)
        for entry_id in action.entry_ids:
            if entry_id < 0 and self.fence_loss and self.draw() < self.fence_loss:
                self._lose((self.to_read, client, bookie_id, entry_id, how), "lost")
            else:
                self.post((self.to_read, client, bookie_id, entry_id, how))

    def to_read(self, message: Message) -> None:
        _, client, bookie_id, entry_id, (fence, epoch) = message
        bookie = self.bookies[bookie_id]
        if not bookie.is_up:
            self.lost(message)
            return
        if fence:
            bookie.fence()
        status, frame = bookie.read(entry_id)
        if self.refusal and self.draw() < self.refusal:
            status, frame = REFUSALS[int(self.draw() * len(REFUSALS))], None
        elif fence:
            bookie.has_answered_fence = True
            self.count("fences")
        max_lac = None if fence else bookie.lac
        answer = ReadResponse(epoch, status, LEDGER_ID, entry_id, frame, max_lac)
        self.post((self.from_read, client, bookie_id, answer, None))

    def from_read(self, message: Message) -> None:
        client = message[1]
        if not client.is_gone:
            client.receive_reads(message[2], [message[3]])

    def to_poll(self, message: Message) -> None:
        """Answer a long poll, or let it wait while the LAC is unchanged. Its first argument is the previous LAC."""
        _, client, bookie_id, previous, epoch = message
        bookie = self.bookies[bookie_id]
        if not bookie.is_up:
            self.lost(message)
            return
        if bookie.lac <= previous and self.draw() < 0.6:
            self.in_flight.append(message)
            return
        answer = ReadResponse(epoch, OK, LEDGER_ID, -1, None, bookie.lac)
        if bookie.lac > previous:
            status, frame = bookie.read(previous + 1)
            if status == OK:
                answer = ReadResponse(epoch, OK, LEDGER_ID, previous + 1, frame, bookie.lac)
        self.post((self.from_poll, client, bookie_id, answer, None))

    def from_poll(self, message: Message) -> None:
        client = message[1]
        if not client.is_gone:
            client.receive_poll(message[2], message[3])

    def to_read_lac(self, message: Message) -> None:
        _, client, bookie_id, epoch, _ = message
        bookie = self.bookies[bookie_id]
        if not bookie.is_up:
            self.lost(message)
            return
        status, last = bookie.read(-1)
        packet = None if status == UNKNOWN else bookie.explicit_lac_packet
        if status not in (OK, UNKNOWN) and packet is not None:
            status = int(Status.IO_ERROR)  # the answer of BookKeeper to an explicit LAC without entries
        answer = ReadLacResponse(epoch, status, LEDGER_ID, packet, last)
        self.post((self.from_read_lac, client, bookie_id, answer, None))

    def from_read_lac(self, message: Message) -> None:
        client = message[1]
        if not client.is_gone:
            client.receive_lac(message[2], message[3])

    def to_write_lac(self, message: Message) -> None:
        bookie = self.bookies[message[2]]
        if bookie.is_up:
            bookie.write_lac(message[3], message[4])

    def lost(self, message: Message) -> None:
        """Report a lost connection to the client."""
        client = message[1]
        if not client.is_gone:
            client.bookie_failed(message[2])

    # -- metadata --------------------------------------------------------------------------------------------------

    def update(self, client: Endpoint, job: Job) -> None:
        """Start a metadata update loop. Other clients may write between its read and its write."""
        self.in_flight.append((self.meta_read, client, None, job, None))

    def _is_held_back(self, message: Message) -> bool:
        """Return whether the client has no connection to the metadata. If so, put its request back in flight."""
        client = message[1]
        if client.is_cut_off and not client.is_gone:
            self.in_flight.append(message)
            return True
        return False

    def meta_read(self, message: Message) -> None:
        _, client, _, (plan, done, failed), _ = message
        if client.is_gone or self._is_held_back(message):
            return
        if self.ledger.is_deleted:
            failed(NoSuchLedger("no such ledger", ledger_id=LEDGER_ID))
            return
        read, version = self.ledger.metadata, self.ledger.version
        try:
            planned = plan(read)
        except BinderyError as error:
            failed(error)
            return
        except AssertionError as error:
            raise Violation(Invariant.SEGMENTS, f"a plan of {client.name} would break metadata") from error
        if planned is None:
            done(read)
        else:
            self.in_flight.append((self.meta_write, client, None, message[3], (planned, version)))

    def meta_write(self, message: Message) -> None:
        """Execute a write, even if its client has ended since: the request was in flight."""
        _, client, _, job, (planned, version) = message
        if self._is_held_back(message):
            return
        if self.unknown and self.draw() < self.unknown:
            self.count("unknown outcomes")
            if self.draw() < 0.7:
                self.ledger.compare_and_set(planned, version)
            if self.draw() < 0.1:
                job[2](MetadataOutcomeUnknown("the answer got lost"))
            else:
                self.update(client, job)
        elif self.ledger.compare_and_set(planned, version):
            self.in_flight.append((self.meta_done, client, None, job, planned))
        else:
            self.count("version conflicts")
            self.update(client, job)

    def meta_done(self, message: Message) -> None:
        if not message[1].is_gone:
            message[3][1](message[4])

    def choose(self, ensemble: Sequence[BookieId], failed: Any) -> dict[int, BookieId]:
        """Choose replacements among the bookies that seem to be available. A crashed bookie may seem available."""
        candidates = [
            Candidate(name, refusal=None if bookie.is_up or self.draw() < 0.1 else "not there")
            for name, bookie in self.bookies.items()
        ]
        return choose_replacements(
            candidates,
            ensemble=ensemble,
            failed=failed,
            write_quorum=self.ledger.metadata.write_quorum,
            rng=self.rng,
        )
