"""Build an index of a history: messages, subscriptions, readings, faults. Pure; the judgement is made elsewhere.

Memory grows linearly with the history: about 1 KiB per message with two subscriptions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sys import intern  # an id occurs about a dozen times: all share one string
from typing import Any, Final

from bindery_e2e.judging.consuming import Consuming
from bindery_e2e.judging.delivery_order import place_of
from bindery_e2e.judging.durability import Durability
from bindery_e2e.judging.history import HistoryError, Record

LOST_ANSWER_NS: Final = 90 * 10**9
"""Nanoseconds after a lost response during which its messages may be missing. More than the pause of a stopped broker
plus the timeout of a request."""


@dataclass(slots=True)
class Sent:
    """A message as recorded by its producer. Times are nanoseconds of the monotonic clock."""

    producer: str
    sequence: int
    topic: str
    digest: str
    sent_at: int
    """Time of the first produce with this message."""
    request: int
    """The last produce with this message; `index` is its position there."""
    index: int
    copies_max: int = 0
    """Number of produces of this message that did not definitely fail."""
    acknowledged: list[tuple[str, int]] = field(default_factory=list)
    """(id, time of the response) of each produce that was acknowledged."""
    key: str = ""

    def __str__(self) -> str:
        return f"{self.producer} #{self.sequence} (operation {self.request})"


@dataclass(frozen=True, slots=True)
class First:
    """The first delivery of a message id to a subscription."""

    sent: Sent | None
    request: int
    answer_lost: bool
    """Whether a response to the subscription was lost shortly before."""


@dataclass(slots=True)
class Subscribed:
    topic: str
    name: str
    kind: str
    since: int = 0
    drained: bool | None = None
    """Whether the subscription was drained in time; None: not checked."""
    first: dict[str, First] = field(default_factory=dict)
    """Message id -> first delivery, in the order of delivery."""
    done: dict[str, int] = field(default_factory=dict)
    """Message id -> time of the response to its acknowledgement."""
    lost_answer_at: int | None = None
    consuming: Consuming | None = None
    """What its consumers did, if the order of deliveries is to be judged."""
    durability: Durability = field(default_factory=Durability)
    open: dict[str, None] = field(default_factory=dict)
    """Ids of delivered messages that no cumulative acknowledgement covers that was answered."""

    def __str__(self) -> str:
        return f"{self.topic} {self.name}"


@dataclass(frozen=True, slots=True)
class Row:
    """A message in a reading."""

    id: str
    producer: str
    sequence: int
    digest: str

    @property
    def key(self) -> tuple[str, int]:
        return self.producer, self.sequence

    def __str__(self) -> str:
        return (
            f"{self.id} ({self.producer} #{self.sequence})" if self.producer else f"{self.id} (not sent by the traffic)"
        )


@dataclass(slots=True)
class Reading:
    round: int
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Request:
    """A produce request, for figures. `done`, `refused`, `unknown`: numbers of its messages."""

    topic: str
    begun: int
    ended: int
    done: int
    refused: int
    unknown: int


@dataclass(frozen=True, slots=True)
class FaultSeen:
    n: int
    fault: str
    target: str
    begin: int
    end: int | None
    """None: the run ended before the fault."""
    outcome: str
    """"ok", "failed", "not offered", or "" before its end."""
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stray:
    """A contradiction that is found while the history is read: kind of error, and description."""

    kind: str
    text: str


class Observed:
    """The index of a history. Raises HistoryError for records that contradict one another."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.facts: Mapping[str, Any] = {}
        self.sent: dict[tuple[str, int], Sent] = {}
        self.ids: dict[tuple[str, str], Sent] = {}
        """(topic, message id) -> the message that was acknowledged with it."""
        self.subscriptions: dict[tuple[str, str], Subscribed] = {}
        self.truth: dict[str, list[Row]] = {}
        """Topic -> the last complete reading."""
        self.faults: dict[int, FaultSeen] = {}
        self.last: dict[str, Mapping[str, Any]] = {}
        """Kind of observation -> its last values."""
        self.strays: list[Stray] = []
        self.counts = dict.fromkeys(("produced", "acknowledged", "refused", "unknown", "delivered", "acks"), 0)
        """Numbers of messages."""
        self.requests: list[Request] = []
        """Sorted by the time of their end."""
        self.deliveries: list[tuple[int, int]] = []
        """(time, number of messages) of each response with messages."""
        self.series: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        """Kind of observation -> (time, values)."""
        self.first_at = 0
        self.last_at = 0
        self.waits: dict[str, tuple[int, int]] = {}
        """Operation -> (time of its last success, longest time between two of them) in nanoseconds."""
        self.acks_by_kind = {"whole": 0, "index": 0, "cumulative": 0}
        """Successful acknowledgements: messages that are entries, messages in batches, requests of all up to one."""
        self._readings: dict[str, Reading] = {}
        self._open: dict[int, Record] = {}
        for record in records:
            self._take(record)
        for record in list(self._open.values()):
            self._end(record, Record("unknown", self.last_at, 0, record.n, {}))

    @property
    def topics(self) -> list[str]:
        """Topics with at least one produce, sorted."""
        return sorted({sent.topic for sent in self.sent.values()})

    def _take(self, record: Record) -> None:
        self.last_at = record.at
        values = record.values
        match record.type:
            case "run":
                self.facts = values
                self.first_at = record.at
            case "invoke":
                self._open[record.n] = record
                if values["op"] == "produce":
                    self._invoke_produce(record)
            case "ok" | "failed" | "unknown":
                begun = self._open.pop(record.n, None)
                if begun is None:
                    raise HistoryError(f"operation {record.n} ends and never began, or ends twice")
                self._end(begun, record)
            case "fault-begin":
                self.faults[record.n] = FaultSeen(
                    record.n, values["fault"], values["target"], record.at, None, "", values
                )
            case "fault-end":
                seen = self.faults.get(record.n)
                if seen is None:
                    raise HistoryError(f"fault {record.n} ends and never began")
                self.faults[record.n] = FaultSeen(
                    seen.n, seen.fault, seen.target, seen.begin, record.at, values["outcome"], {**seen.values, **values}
                )
            case "observation":
                self._observe(record)

    def _observe(self, record: Record) -> None:
        values = record.values
        what = values["what"]
        self.last[what] = values
        self.series.setdefault(what, []).append((record.at, values))
        if what == "subscribed":
            subscribed = self._subscribed(values, kind=values["kind"])
            subscribed.since = record.at
            if "order" in values:
                subscribed.consuming = Consuming(values["kind"], values["order"])
        elif what == "drained":
            self._subscribed(values).drained = bool(values["complete"])

    def _subscribed(self, values: Mapping[str, Any], *, kind: str = "shared") -> Subscribed:
        key = values["topic"], values["subscription"]
        found = self.subscriptions.get(key)
        if found is None:
            found = self.subscriptions[key] = Subscribed(*key, kind=kind)
        return found

    # -- operations ----------------------------------------------------------------------------------------------------

    def _end(self, begun: Record, ended: Record) -> None:
        if ended.type == "ok":
            last, longest = self.waits.get(begun.values["op"], (ended.at, 0))
            self.waits[begun.values["op"]] = ended.at, max(longest, ended.at - last)
        if "subscription" in begun.values:
            begun = self._take_on_subscription(begun, ended)
        match begun.values["op"]:
            case "produce":
                self._end_produce(begun, ended)
            case "receive":
                self._end_receive(begun, ended)
            case "ack" if ended.type == "ok":
                done = self._subscribed(begun.values).done
                for message_id in begun.values["ids"]:
                    done.setdefault(intern(message_id), ended.at)
                self.counts["acks"] += len(begun.values["ids"])
            case "read" if ended.type == "ok":
                self._end_read(begun, ended)

    def _take_on_subscription(self, begun: Record, ended: Record) -> Record:
        """Add an operation to what the subscription has. Returns its begin, with `ids` if it is an acknowledgement."""
        values = begun.values
        subscribed = self._subscribed(values, kind=values.get("kind", "shared"))
        last = values.get("cumulative")
        if last is not None:
            place = place_of(last)
            ids = [text for text in subscribed.open if place_of(text) <= place]
            begun = Record(begun.type, begun.at, begun.wall, begun.n, {**values, "ids": ids})
            if ended.type == "ok":
                self.acks_by_kind["cumulative"] += 1
                for text in ids:
                    del subscribed.open[text]
        elif values["op"] == "ack" and ended.type == "ok":
            in_batch = sum(not text.endswith(":-1") for text in values["ids"])
            self.acks_by_kind["index"] += in_batch
            self.acks_by_kind["whole"] += len(values["ids"]) - in_batch
        elif values["op"] == "receive" and ended.type == "ok" and subscribed.kind in ("exclusive", "failover"):
            subscribed.open.update((row[0], None) for row in ended.values["messages"])
        subscribed.durability.take(begun, ended)
        if subscribed.consuming is not None:
            subscribed.consuming.take(begun, ended)
        return begun

    def _invoke_produce(self, record: Record) -> None:
        values = record.values
        producer, topic = values["process"], values["topic"]
        keys = values.get("keys", [""] * len(values["sequences"]))
        for index, (sequence, digest, key) in enumerate(zip(values["sequences"], values["digests"], keys, strict=True)):
            self.counts["produced"] += 1
            sent = self.sent.get((producer, sequence))
            if sent is None:
                sent = Sent(intern(producer), sequence, intern(topic), intern(digest), record.at, record.n, index)
                sent.key = intern(key)
                self.sent[producer, sequence] = sent
            elif (sent.topic, sent.digest) != (topic, digest):
                raise HistoryError(f"operation {record.n} sends another message as {sent}")
            sent.request, sent.index = record.n, index
            sent.copies_max += 1

    def _end_produce(self, begun: Record, ended: Record) -> None:
        values = begun.values
        sequences = values["sequences"]
        outcomes = ended.values["ids"] if ended.type == "ok" else [ended.type] * len(sequences)
        refused, unknown = outcomes.count("failed"), outcomes.count("unknown")
        done = len(outcomes) - refused - unknown
        self.requests.append(Request(values["topic"], begun.at, ended.at, done, refused, unknown))
        self.counts["acknowledged"] += done
        self.counts["refused"] += refused
        self.counts["unknown"] += unknown
        for sequence, outcome in zip(sequences, outcomes, strict=True):
            sent = self.sent[values["process"], sequence]
            if outcome == "failed":
                sent.copies_max -= 1
            elif outcome != "unknown":
                sent.acknowledged.append((intern(outcome), ended.at))
                other = self.ids.setdefault((sent.topic, intern(outcome)), sent)
                if other is not sent or len(sent.acknowledged) != len(set(sent.acknowledged)):
                    text = f"{sent.topic}: id {outcome} was given to {other} and to {sent}"
                    self.strays.append(Stray("duplicate", text))

    def _end_receive(self, begun: Record, ended: Record) -> None:
        subscribed = self._subscribed(begun.values, kind=begun.values["kind"])
        if ended.type == "unknown":
            subscribed.lost_answer_at = ended.at
        if ended.type != "ok":
            return
        if ended.values["messages"]:
            self.deliveries.append((ended.at, len(ended.values["messages"])))
            self.counts["delivered"] += len(ended.values["messages"])
        lost_at = subscribed.lost_answer_at
        answer_lost = lost_at is not None and ended.at - lost_at < LOST_ANSWER_NS
        for message_id, producer, sequence, digest, _ in ended.values["messages"]:
            sent = self.sent.get((producer, sequence))
            wrong: list[tuple[str, str]] = []
            if sent is None or sent.topic != subscribed.topic:
                wrong.append(("phantom", "which no producer sent there"))
                sent = None
            elif sent.digest != digest:
                wrong.append(("changed", f"payload {digest}, sent was {sent.digest}"))
            done_at = subscribed.done.get(message_id)
            if done_at is not None and begun.at > done_at:
                early_s = (begun.at - done_at) / 1e9
                wrong.append(("redelivered", f"asked for {early_s:.3f} s after its acknowledgement was answered"))
            before = subscribed.first.get(message_id)
            if before is None:
                subscribed.first[intern(message_id)] = First(sent, begun.n, answer_lost)
            elif before.sent is not sent:
                wrong.append(("changed", f"the same id was {before.sent} before"))
            for kind, how in wrong:
                row = Row(message_id, producer, sequence, digest)
                self.strays.append(Stray(kind, f"{subscribed}: {row} in operation {begun.n}, {how}"))

    def _end_read(self, begun: Record, ended: Record) -> None:
        topic, number = begun.values["topic"], begun.values["round"]
        reading = self._readings.get(topic)
        if reading is None or reading.round != number:
            reading = self._readings[topic] = Reading(number)
        reading.rows += [
            Row(intern(message_id), intern(producer), sequence, intern(digest))
            for message_id, producer, sequence, digest in ended.values["messages"]
        ]
        if ended.values["end"]:
            self.truth[topic] = reading.rows
