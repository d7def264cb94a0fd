"""Judge the retries and dead letters of a topic whose broker and bookies were killed. Pure.

A *stage* is a message of the topic, or one of its copies in the retry topic. A stage is done when a consumer has
acknowledged it, or when it has a *follower*: the copy with the next RECONSUMETIMES, in the retry topic or the
dead-letter topic (by a retry), or a dead letter with the same RECONSUMETIMES (by returns). Each message is a chain of
stages, which ends with an acknowledgement or a dead letter. The topics are read after the last kill; nothing is
trimmed.

| error      | meaning                                                                                                 |
|------------|---------------------------------------------------------------------------------------------------------|
| lost       | missing under the id that was answered; or a stage without follower that no request acknowledged        |
| two-copies | one ORIGIN_MESSAGE_ID and RECONSUMETIMES stored twice, or one message that is two dead letters          |
| two-places | a follower that was written after an acknowledgement of the stage had been answered                     |
| no-copy    | a retry that was answered as moved, and has no copy under that id, with its origin and RECONSUMETIMES   |
| phantom    | a copy of no message, or of a stage that no request and no return can have moved                        |
| gap        | copies of a message whose RECONSUMETIMES are not 1, 2, 3 and so on                                      |
| changed    | payload, key or properties differ from the original's, or a delivery differs from what is stored        |
| again      | delivered by a request made after an answered acknowledgement or retry, or after the follower's write   |
| wrong-limit| a retry beyond its `max_redeliver`; a dead letter that was returned too seldom; a delivery beyond that  |
| undrained  | consumers did not acknowledge everything in time                                                        |

A request without an answer is *unknown*: it may have been done or not. Times of copies are their publish times, on the
clock of the machine that also runs the clients.

The history (`history`) has these operations in addition to `produce`, `ack` and `nack`:

| op      | invoke                                            | ok                                                     |
|---------|---------------------------------------------------|--------------------------------------------------------|
| receive | topic, subscription, kind; max_redeliver          | messages: rows, and the redelivery count at their end  |
| retry   | topic, subscription, ids, max_redeliver, delay_ms | moved: [id, topic, copy id, RECONSUMETIMES] each;      |
|         |                                                   | acknowledged: ids; failed: [id, status] each           |
| read    | topic, start, round                               | messages: rows; end                                    |

A row is `[id, producer, sequence, digest, publish time, key, RECONSUMETIMES, ORIGIN_MESSAGE_ID, REAL_SUBSCRIPTION,
REAL_TOPIC, names of other properties]`; a property that is missing is "". The observation `retries` names the topics of
a subscription: topic, subscription, retry, dead_letters. `ending`: from then on nothing is produced.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from bindery_e2e.judging.history import Record

EXAMPLES_MAX: Final = 5
CLOCK_ERROR_MS: Final = 20
"""Maximum difference in milliseconds between publish times and the times of the history."""
OUTCOME_UNKNOWN: Final = 504
"""Status of a message of a retry of which it is not known whether it was moved."""
TIMED: Final = ("produce", "receive", "retry", "ack")
"""Operations whose longest time without an answer is computed."""


class Row(NamedTuple):
    """A message that is stored or was delivered."""

    id: str
    producer: str
    sequence: int
    digest: str
    published: int
    """Milliseconds since 1970."""
    key: str
    times: str
    """RECONSUMETIMES; "": none."""
    origin: str
    subscription: str
    topic: str
    others: list[str]
    """Names of all properties that neither the traffic nor a move sets."""

    @property
    def retried(self) -> int:
        """RECONSUMETIMES as a number; 0 if there is none."""
        return int(self.times) if self.times.isdecimal() else 0

    @property
    def content(self) -> tuple[str, int, str, str]:
        return self.producer, self.sequence, self.digest, self.key


class Attempt(NamedTuple):
    """A request about a stage. Times are milliseconds since 1970."""

    n: int
    op: str
    begun: int
    ended: int
    """When it was answered; of unknown outcome: when the client stopped waiting."""
    is_sure: bool
    limit: int = 0
    """`max_redeliver` of a retry."""


@dataclass(slots=True)
class Retries:
    """The judgement, and figures."""

    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    """Kills by the name of the process."""
    messages: int = 0
    """Messages in the topic."""
    deliveries: int = 0
    acked: int = 0
    """Chains that end with an acknowledgement."""
    copies: int = 0
    """Messages in the retry topics."""
    moved: int = 0
    """Copies that an answer to a retry has named."""
    by_retry: int = 0
    """Dead letters that were retried too often."""
    by_returns: int = 0
    """Dead letters that were returned too often."""
    unanswered: int = 0
    """Copies by retries that no answer has named."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Requests of unknown outcome by operation."""
    silence_s: dict[str, float] = field(default_factory=dict)
    """Operation -> longest time between two successes while messages were produced, in seconds."""

    def add(self, kind: str, text: str) -> None:
        self.errors[kind] += 1
        if self.errors[kind] <= EXAMPLES_MAX:
            self.examples.append(f"{kind}: {text}")

    @property
    def verdict(self) -> str:
        """GOOD, BAD, or INCOMPLETE: without errors, and without kills, retries or dead letters of both kinds."""
        if self.errors:
            return "BAD"
        return "GOOD" if all((self.kills, self.copies, self.by_retry, self.by_returns)) else "INCOMPLETE"

    def __str__(self) -> str:
        bookies = sum(count for name, count in self.kills.items() if name.startswith("bookie"))
        unknown = ", ".join(f"{self.unknown[op]:,} {op}" for op in TIMED)
        silence = ", ".join(f"{op} {self.silence_s.get(op, 0):.1f} s" for op in TIMED)
        errors = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.errors.items())) or "no errors"
        return (
            f"{self.kills.total()} kills; {self.kills.total() - bookies} of the broker, {bookies} of bookies; "
            f"{self.messages:,} messages, {self.deliveries:,} deliveries; {self.acked:,} acknowledged at the end; "
            f"{self.copies:,} retries; dead letters: {self.by_retry:,} by retries, {self.by_returns:,} by returns; "
            f"{self.moved:,} copies by answered retries, {self.unanswered:,} by others; requests of unknown outcome: "
            f"{unknown}; longest time without an answer: {silence}; {errors}"
        )


class _Subscription:
    """What was observed of one subscription."""

    def __init__(self, name: str, topic: str, retry: str, dead_letters: str) -> None:
        self.name, self.topic, self.retry, self.dead_letters = name, topic, retry, dead_letters
        self.attempts: dict[str, list[Attempt]] = defaultdict(list)
        """Id of a stage -> requests about it that were not refused: ack, retry and nack."""
        self.deliveries: dict[str, list[tuple[Attempt, Row, int]]] = defaultdict(list)
        """Id -> receive, row, redelivery count."""
        self.lost_receives: list[Attempt] = []
        self.moved: list[tuple[int, str, str, str, int]] = []
        """Operation, id, topic, id of the copy, RECONSUMETIMES."""
        self.moved_to: set[str] = set()
        """Ids of these copies."""
        self.is_drained = False


class _History:
    """The records by what they are about."""

    def __init__(self, records: Iterable[Record], found: Retries) -> None:
        self.found = found
        self.subscriptions: dict[str, _Subscription] = {}
        self.stored: dict[str, dict[str, Row]] = defaultdict(dict)
        """Topic -> rows of its last reading, by id."""
        self.is_read: set[str] = set()
        self.produced: list[tuple[str, str, int, str, str]] = []
        """Id, producer, sequence, digest and key of each answered message."""
        self.refused: set[tuple[str, int]] = set()
        self._last_ok: dict[str, int] = {}
        self._is_ending = False
        open_ops: dict[int, Record] = {}
        for record in records:
            match record.type:
                case "invoke" | "fault-begin":
                    open_ops[record.n] = record
                case "ok" | "failed" | "unknown":
                    self._ended(open_ops.pop(record.n), record)
                case "fault-end" if "killed_at" in record.values:
                    found.kills[open_ops.pop(record.n).values["target"]] += 1
                case "observation":
                    self._observed(record.values)
        for begun in open_ops.values():
            if begun.type == "invoke":
                self._ended(begun, replace(begun, type="unknown"))

    def _observed(self, values: Mapping[str, Any]) -> None:
        match values["what"]:
            case "retries":
                names = (values[name] for name in ("subscription", "topic", "retry", "dead_letters"))
                self.subscriptions[values["subscription"]] = _Subscription(*names)
            case "drained" if values["complete"]:
                self.subscriptions[values["subscription"]].is_drained = True
            case "ending":
                self._is_ending = True

    def _ended(self, begun: Record, ended: Record) -> None:
        values, op = begun.values, begun.values["op"]
        if ended.type == "ok" and op in TIMED and not self._is_ending:
            last = self._last_ok.get(op, ended.at)
            self.found.silence_s[op] = max(self.found.silence_s.get(op, 0.0), (ended.at - last) / 1e9)
            self._last_ok[op] = ended.at
        if ended.type == "unknown":
            self.found.unknown[op] += 1
        attempt = Attempt(begun.n, op, begun.wall, ended.wall, ended.type == "ok", values.get("max_redeliver", 0))
        if op == "produce":
            self._produced(values, ended)
        elif op == "read" and ended.type == "ok":
            if values["start"] == "earliest":
                self.stored[values["topic"]].clear()
            for line in ended.values["messages"]:
                self.stored[values["topic"]][line[0]] = Row(*line)
            if ended.values["end"]:
                self.is_read.add(values["topic"])
        elif "subscription" in values:
            self._consumed(self.subscriptions[values["subscription"]], attempt, values, ended)

    def _produced(self, values: Mapping[str, Any], ended: Record) -> None:
        count = len(values["sequences"])
        ids = ended.values["ids"] if ended.type == "ok" else [ended.type] * count
        rows = zip(ids, values["sequences"], values["digests"], values["keys"], strict=True)
        for message_id, sequence, digest, key in rows:
            if message_id == "failed":
                self.refused.add((values["process"], sequence))
            elif message_id != "unknown":
                self.produced.append((message_id, values["process"], sequence, digest, key))

    def _consumed(self, of: _Subscription, attempt: Attempt, values: Mapping[str, Any], ended: Record) -> None:
        if attempt.op == "receive":
            if ended.type == "ok":
                for *line, count in ended.values["messages"]:
                    of.deliveries[line[0]].append((attempt, Row(*line), count))
                    self.found.deliveries += 1
            else:
                of.lost_receives.append(attempt)
        elif ended.type != "failed":
            refused: set[str] = set()
            if attempt.op == "retry" and attempt.is_sure:
                statuses = dict(ended.values["failed"])
                refused = {one for one, status in statuses.items() if status != OUTCOME_UNKNOWN}
                of.moved += [(attempt.n, *line) for line in ended.values["moved"]]
                of.moved_to |= {line[2] for line in ended.values["moved"]}
                done = {line[0] for line in ended.values["moved"]} | set(ended.values["acknowledged"])
            else:
                done = set(values["ids"]) if attempt.is_sure else set()
            for one in values["ids"]:
                if one not in refused:
                    of.attempts[one].append(attempt._replace(is_sure=one in done))


class _Stage(NamedTuple):
    row: Row
    follower: Row | None
    """None: it is the last stage in the topic or the retry topic."""
    is_dead: bool
    """Whether the follower is a dead letter."""


def judge_retries(records: Iterable[Record]) -> Retries:
    """Judge a history."""
    found = Retries()
    history = _History(records, found)
    source = next((history.stored[of.topic] for of in history.subscriptions.values()), {})
    found.messages = len(source)
    _judge_source(history, source)
    for of in history.subscriptions.values():
        _judge_subscription(history, of, source)
    return found


def _judge_source(history: _History, source: Mapping[str, Row]) -> None:
    found = history.found
    for topic in {topic for of in history.subscriptions.values() for topic in (of.topic, of.retry, of.dead_letters)}:
        if topic not in history.is_read:
            found.add("undrained", f"{topic} was not read to its end")
    for message_id, *content in history.produced:
        row = source.get(message_id)
        if row is None:
            found.add("lost", f"message {message_id} ({content[0]} {content[1]}) is missing in the topic")
        elif list(row.content) != content:
            found.add("changed", f"message {message_id} is {row.content}, {content} was sent")
    for row in source.values():
        if (row.producer, row.sequence) in history.refused:
            found.add("phantom", f"message {row.id} was refused to its producer")


def _judge_subscription(history: _History, of: _Subscription, source: Mapping[str, Row]) -> None:
    found = history.found
    if not of.is_drained:
        found.add("undrained", f"{of.name} or its retry topic has messages that are not acknowledged")
    retries, dead = history.stored[of.retry], history.stored[of.dead_letters]
    found.copies += len(retries)
    found.moved += len(of.moved)
    origins = {_origin(row.id): row for row in source.values()}
    by_times: dict[str, dict[int, Row]] = defaultdict(dict)
    ends: dict[str, Row] = {}
    for row in [*retries.values(), *dead.values()]:
        where = f"{of.name}: {row.id} of {'the retry topic' if row.id in retries else 'the dead letters'}"
        original = origins.get(row.origin)
        if original is None:
            found.add("phantom", f"{where} has the origin {row.origin!r}, which the topic does not have")
            continue
        if (row.content, row.others) != (original.content, original.others):
            found.add("changed", f"{where} is {row.content} with {row.others}, the original is {original}")
        if (row.subscription, row.topic.removeprefix("persistent://")) != (of.name, of.topic):
            found.add("changed", f"{where} is from {row.subscription!r} of {row.topic!r}")
        if row.id in dead and row.id not in retries:
            other = ends.setdefault(row.origin, row)
        else:
            other = by_times[row.origin].setdefault(row.retried, row)
        if other is not row:
            found.add(
                "two-copies", f"{where} has the origin and RECONSUMETIMES of {other.id}: {row.origin}, {row.times!r}"
            )
    for n, message_id, topic, copy_id, times in of.moved:
        copy = history.stored[topic].get(copy_id)
        stage = retries.get(message_id) or source.get(message_id)
        origin = None if stage is None else stage.origin or _origin(stage.id)
        if copy is None or (copy.origin, copy.retried) != (origin, times):
            found.add(
                "no-copy", f"{of.name}: operation {n} moved {message_id} to {copy_id} of {topic}, which is {copy}"
            )
    for origin, original in origins.items():
        copies = by_times.get(origin, {})
        if sorted(copies) != list(range(1, len(copies) + 1)):
            found.add("gap", f"{of.name}: {original.id} has copies with RECONSUMETIMES {sorted(copies)}")
            continue
        end = ends.get(origin)
        for one in _chain(original, copies, end):
            _judge_stage(of, one, found)
        if end is None:
            found.acked += 1
        elif end.retried == len(copies) + 1:
            found.by_retry += 1
        elif end.retried == len(copies):
            found.by_returns += 1
        else:
            found.add("gap", f"{of.name}: {original.id} was retried {len(copies)} times, its dead letter {end.times!r}")
    known = {**source, **retries}
    for message_id, deliveries in of.deliveries.items():
        stored = known.get(message_id)
        for attempt, row, _ in deliveries:
            if stored is None:
                found.add("phantom", f"{of.name}: operation {attempt.n} delivered {message_id}, which is not stored")
            elif row != stored:
                found.add("changed", f"{of.name}: operation {attempt.n} delivered {row}, {stored} is stored")


def _chain(original: Row, copies: Mapping[int, Row], end: Row | None) -> Iterator[_Stage]:
    row = original
    for times in range(1, len(copies) + 1):
        yield _Stage(row, copies[times], False)
        row = copies[times]
    yield _Stage(row, end, end is not None)


def _judge_stage(of: _Subscription, stage: _Stage, found: Retries) -> None:
    row, follower, _ = stage
    name = f"{of.name}: {row.id} (RECONSUMETIMES {row.times!r})"
    attempts = of.attempts.get(row.id, [])
    acks = [one for one in attempts if one.op == "ack"]
    retries = [one for one in attempts if one.op == "retry"]
    if follower is None and not acks:
        found.add("lost", f"{name} has no follower, and no request acknowledged it: {_short(attempts)}")
    if follower is not None:
        answered = min((one.ended for one in acks if one.is_sure), default=None)
        if answered is not None and follower.published > answered + CLOCK_ERROR_MS:
            found.add(
                "two-places",
                f"{name} was acknowledged, and {follower.id} written {follower.published - answered} ms later",
            )
        if stage.is_dead and follower.retried == row.retried:
            _judge_returns(of, row, follower, name, found)
        else:
            _judge_retried(stage, retries, name, found)
            found.unanswered += follower.id not in of.moved_to
    done_at = min((one.ended for one in attempts if one.is_sure and one.op != "nack"), default=None)
    for attempt, _, count in of.deliveries.get(row.id, ()):
        if done_at is not None and attempt.begun > done_at:
            found.add("again", f"{name} came in operation {attempt.n}, after it was done: {_short(attempts)}")
        elif follower is not None and attempt.begun > follower.published + CLOCK_ERROR_MS:
            late = attempt.begun - follower.published
            found.add("again", f"{name} came in operation {attempt.n}, {late} ms after {follower.id} was written")
        if count > attempt.limit:
            found.add("wrong-limit", f"{name} came in operation {attempt.n} with redelivery count {count}")


def _judge_retried(stage: _Stage, retries: list[Attempt], name: str, found: Retries) -> None:
    """Judge a follower that a retry has written."""
    row, follower, is_dead = stage
    assert follower is not None
    able = [one for one in retries if one.begun <= follower.published + CLOCK_ERROR_MS]
    if not able:
        found.add("phantom", f"{name} has the copy {follower.id}, although no retry can have moved it")
        return
    if not any((row.retried + 1 > one.limit) == is_dead for one in able):
        where = "a dead letter" if is_dead else "a retry"
        found.add("wrong-limit", f"{name} became {where}; max_redeliver was {able[0].limit}")


def _judge_returns(of: _Subscription, row: Row, follower: Row, name: str, found: Retries) -> None:
    """Judge a dead letter that was returned too often: all counts up to the limit were, or may have been, delivered."""
    before = [
        (attempt, count) for attempt, _, count in of.deliveries.get(row.id, ()) if attempt.begun <= follower.published
    ]
    highest = max((count for _, count in before), default=-1)
    limit = max((attempt.limit for attempt, _ in before), default=0)
    unseen = sum(one.begun <= follower.published for one in of.lost_receives)
    if highest + unseen < limit:
        found.add("wrong-limit", f"{name} is a dead letter, and came with redelivery counts up to {highest} before")


def _origin(message_id: str) -> str:
    """Return an id as ORIGIN_MESSAGE_ID has it: without the index of a message that is an entry."""
    return message_id.removesuffix(":-1") if message_id.count(":") == 3 else message_id


def _short(attempts: list[Attempt]) -> str:
    return (
        ", ".join(f"{one.op} {one.n} {'answered' if one.is_sure else 'unknown'}" for one in attempts) or "no requests"
    )
