"""Index a history: its messages, the lives of its subscriptions, and which acknowledgements and seeks may have applied.

An acknowledgement or a seek of unknown outcome may have applied at any time after it was sent: its messages need not be
delivered any more, and may be. A seek that is done undoes the acknowledgements, and the seeks, that were settled
before it started, for all messages from its target on.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bindery_simulation.topics.judging.history import (
    WHOLE_ENTRY,
    Acknowledge,
    Call,
    Copied,
    History,
    Instant,
    Key,
    Leave,
    Payload,
    Produce,
    ReadCopies,
    Receive,
    Return,
    Seek,
    Subscribe,
    SubscriptionId,
    Unsubscribe,
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message that was acknowledged to its producer."""

    key: Key
    payload: Payload
    call: Call


@dataclass(slots=True)
class Life:
    """One life of a subscription, and its calls in the order in which they were sent."""

    id: SubscriptionId
    since: Instant | None = None
    """When it certainly existed; None: its creation was never answered."""
    is_earliest: bool = False
    until: Instant | None = None
    """When its deletion was requested; None: never."""
    receives: list[Call] = field(default_factory=list)
    """Those that returned messages, in the order in which they were settled."""
    calls: list[Call] = field(default_factory=list)
    """All other calls that concern its messages, and all calls to receive."""
    seeks: list[Call] = field(default_factory=list)
    cumulative: list[Call] = field(default_factory=list)
    acks: dict[Key, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Acknowledgements that are not cumulative, by each of their keys."""

    def exists_at(self, instant: Instant) -> bool:
        """Return whether the subscription certainly existed at `instant`."""
        return self.since is not None and self.since < instant and (self.until is None or instant < self.until)


class Facts:
    """The index of one history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.end = history.instant()
        self.produced: dict[str, Call] = {}
        """The call that sent each message, by text."""
        self.payloads: dict[str, Payload] = {}
        self.stored: dict[str, dict[Key, Stored]] = defaultdict(dict)
        """Messages that were acknowledged to their producers, by topic and key."""
        self.lives: dict[SubscriptionId, Life] = {}
        self.copies: dict[SubscriptionId, tuple[Copied, ...]] = {}
        """What the retry topics, then the dead-letter topics, hold at the end, by subscription."""
        self._read: dict[tuple[SubscriptionId, bool], tuple[Copied, ...]] = {}
        """The same by subscription and whether it is the dead-letter topic."""
        self._trimmed: dict[tuple[str, int], Instant] = {}
        self._opened: dict[str, list[tuple[int, Instant]]] = defaultdict(list)
        for event in history.trimmed:
            for ledger_id in event.ledgers:
                self._trimmed.setdefault((event.topic, ledger_id), event.at)
        for opened in history.opened:
            self._opened[opened.topic].append((opened.incarnation, opened.at))
        for call in history.calls:
            self._index(call)
        for life in self.lives.values():
            life.receives.sort(key=lambda call: call.settled or self.end)
        self._keys = {topic: sorted(messages) for topic, messages in self.stored.items()}

    def _index(self, call: Call) -> None:
        request = call.request
        if isinstance(request, Produce):
            self._index_produce(call, request)
            return
        if isinstance(request, ReadCopies):
            if call.is_done:
                assert isinstance(call.result, tuple)
                subscription = request.subscription
                self._read[subscription, request.is_dead] = call.result
                self.copies[subscription] = sum((self._read.get((subscription, one), ()) for one in (False, True)), ())
            return
        life = self.lives.get(request.subscription)
        if life is None:
            life = self.lives[request.subscription] = Life(request.subscription)
        life.calls.append(call)
        if isinstance(request, Subscribe):
            life.is_earliest = request.earliest
            if call.is_done and (life.since is None or (call.settled is not None and call.settled < life.since)):
                life.since = call.settled
        elif isinstance(request, Unsubscribe):
            if call.may_be_done and (life.until is None or call.sent < life.until):
                life.until = call.sent
        elif isinstance(request, Acknowledge) and call.may_be_done:
            if request.cumulative:
                life.cumulative.append(call)
            else:
                for key in request.keys:
                    life.acks[key].append(call)
        elif isinstance(request, Seek) and call.may_be_done:
            life.seeks.append(call)
        elif isinstance(request, Receive) and call.deliveries:
            life.receives.append(call)

    def _index_produce(self, call: Call, request: Produce) -> None:
        for payload in request.messages:
            self.produced[payload.text] = call
            self.payloads[payload.text] = payload
        if call.is_done:
            assert isinstance(call.result, tuple)
            for payload, key in zip(request.messages, call.result, strict=True):
                self.stored[request.topic][key] = Stored(key, payload, call)

    # --- messages ---------------------------------------------------------------------------------------------------

    def messages(self, topic: str) -> Iterator[Stored]:
        """Return the acknowledged messages of a topic in its order."""
        stored = self.stored.get(topic, {})
        return (stored[key] for key in self._keys.get(topic, ()))

    def between(self, topic: str, after: Key | None, before: Key) -> Iterator[Stored]:
        """Return the acknowledged messages after `after` (None: from the first on) and before `before`."""
        keys: Sequence[Key] = self._keys.get(topic, ())
        first = 0 if after is None else bisect_right(keys, after)
        stored = self.stored.get(topic, {})
        return (stored[keys[at]] for at in range(first, bisect_left(keys, before)))

    def is_owed(self, life: Life, message: Stored) -> bool:
        """Return whether the subscription must receive the message: it was stored later, or existed at its beginning.

        A subscription that begins with the oldest message does not get those that were trimmed before.
        """
        if life.since is None:
            return False
        if message.call.sent > life.since:
            return True
        trimmed = self._trimmed.get((life.id.topic, message.key[0]))
        return life.is_earliest and (trimmed is None or trimmed > life.since)

    # --- acknowledgements and seeks ---------------------------------------------------------------------------------

    def acks_of(self, life: Life, key: Key) -> Iterator[Call]:
        """Return the acknowledgements that name the message, whether they were carried out or not."""
        yield from life.acks.get(key, ())
        entry = (key[0], key[1], WHOLE_ENTRY)
        if entry != key:
            yield from life.acks.get(entry, ())
        for call in life.cumulative:
            if is_covered(call, key):
                yield call

    def may_be_acked(self, life: Life, key: Key, at: Instant) -> bool:
        """Return whether an acknowledgement of the message may have applied at `at`, and was not certainly undone."""
        return any(call.sent < at and not self._is_undone(life, call, key, at) for call in self.acks_of(life, key))

    def may_be_skipped(self, life: Life, message: Stored, at: Instant) -> bool:
        """Return whether a seek may have moved the subscription behind the message."""
        return any(
            seek.sent < at and self._skips(seek, message) and not self._is_undone(life, seek, message.key, at)
            for seek in life.seeks
        )

    def is_exempt(self, life: Life, message: Stored, at: Instant) -> bool:
        """Return whether the message need not be delivered after `at`."""
        return self.may_be_acked(life, message.key, at) or self.may_be_skipped(life, message, at)

    def certain_acks(self, life: Life, key: Key, at: Instant) -> Iterator[Call]:
        """Return the acknowledgements of the message that were answered before `at` and that no seek may undo."""
        for call in self.acks_of(life, key):
            if call.is_done and call.settled is not None and call.settled < at and not self.was_stale(call):
                started = call.started or call.sent
                if not any(seek.sent < at and not seek.settled_before(started) for seek in life.seeks):
                    yield call

    @staticmethod
    def _skips(seek: Call, message: Stored) -> bool:
        request = seek.request
        assert isinstance(request, Seek)
        if request.to is not None:
            return request.to > message.key
        return not request.earliest and not (seek.settled is not None and seek.settled < message.call.sent)

    @staticmethod
    def _is_undone(life: Life, call: Call, key: Key, at: Instant) -> bool:
        settled = call.settled
        if settled is None:
            return False
        return any(
            seek.is_done
            and seek.started is not None
            and seek.started > settled
            and seek.settled_before(at)
            and isinstance(seek.result, tuple)
            and seek.result <= key[:2]
            for seek in life.seeks
        )

    # --- owners -----------------------------------------------------------------------------------------------------

    def successor(self, topic: str, incarnation: int | None, at: Instant) -> int | None:
        """Return a later opening of the topic that was complete before `at`; None: there was none."""
        if incarnation is None:
            return None
        later = (number for number, opened in self._opened[topic] if number > incarnation and opened < at)
        return next(later, None)

    def was_stale(self, call: Call, *, at: Instant | None = None) -> bool:
        """Return whether another broker had opened the topic at `at`; None: when the broker of the call started it."""
        at = at or call.started
        return at is not None and self.successor(topic_of(call), call.incarnation, at) is not None


def topic_of(call: Call) -> str:
    request = call.request
    return request.topic if isinstance(request, Produce) else request.subscription.topic


def is_covered(call: Call, key: Key) -> bool:
    """Return whether the acknowledgement names the message."""
    request = call.request
    assert isinstance(request, Acknowledge)
    if not request.cumulative:
        return key in request.keys or (key[0], key[1], WHOLE_ENTRY) in request.keys
    last = request.keys[0]
    return key[:2] <= last[:2] if last[2] == WHOLE_ENTRY else key <= last


def releases(call: Call, consumer: str, key: Key) -> bool:
    """Return whether the call may have ended the lease of a consumer on a message, even if the call failed."""
    request = call.request
    if isinstance(request, Acknowledge):
        return is_covered(call, key)
    if isinstance(request, Return):
        return key in request.keys or (key[0], key[1], WHOLE_ENTRY) in request.keys
    if isinstance(request, Leave):
        return request.consumer == consumer
    if isinstance(request, Receive):
        return request.redeliver and request.consumer == consumer
    return isinstance(request, Seek)
