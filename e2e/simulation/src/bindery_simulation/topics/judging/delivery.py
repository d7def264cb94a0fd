"""Rules about deliveries: what consumers may receive, in which order, and who holds a message.

Most rules compare deliveries of one *incarnation*: one opening of the topic by one broker. Only acknowledgements are
durable (and redelivery counts, if `Rules.durable_counts`). A broker that lost the topic and has not detected it yet may
deliver messages that were acknowledged at its successor: delivery is at least once.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from bindery_simulation.topics.judging.facts import Facts, Life, Stored, releases
from bindery_simulation.topics.judging.history import (
    Acknowledge,
    Breach,
    Call,
    Instant,
    Key,
    Kind,
    Leave,
    Receive,
    Return,
    Rules,
    Seek,
    id_text,
)

SLACK_S = 1e-6
"""Tolerance in seconds of comparisons of sums of times."""
HANDOVER_S = 1.0
"""Seconds for which a new active consumer of a failover subscription waits for acknowledgements of the former one."""


def nothing_invented(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A delivered message was sent, was not refused, and has one id, the one that its producer got."""
    ids: dict[str, Key] = {}
    for life in facts.lives.values():
        for call in life.receives:
            for key, text, _ in call.deliveries:
                sent = facts.produced.get(text)
                if sent is None:
                    yield _breach("nothing-invented", f"{call} delivered {text!r}, which nobody sent", call)
                elif not sent.may_be_done:
                    problem = f"{call} delivered {text!r}, whose producer was told that it is not stored ({sent})"
                    yield _breach("nothing-invented", problem, sent, call)
                elif ids.setdefault(text, key) != key:
                    problem = f"{call} delivered {text!r} as {id_text(key)}, which was {id_text(ids[text])} before"
                    yield _breach("nothing-invented", problem, call)
                known = facts.stored[life.id.topic].get(key)
                if known is not None and known.payload.text != text:
                    problem = f"{call} delivered {text!r} as {id_text(key)}, which is {known.payload.text!r}"
                    yield _breach("nothing-invented", problem, call)


def no_delivery_after_durable_ack(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A message is not delivered after its acknowledgement was answered, by the same owner or a later one."""
    for life in facts.lives.values():
        for call in life.receives:
            at, incarnation = call.settled, call.incarnation
            if at is None or incarnation is None:
                continue
            for key, text, _ in call.deliveries:
                for ack in facts.certain_acks(life, key, at):
                    if ack.incarnation is not None and ack.incarnation <= incarnation:
                        problem = f"{call} delivered {text!r} ({id_text(key)}) after {ack} acknowledged it"
                        yield _breach("no-delivery-after-durable-ack", problem, ack, call)
                        break


def order_exclusive(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """Exclusive and Failover: the order of the topic, without gaps; backwards only for a reason, to the first message.

    A rewind has a reason: messages were returned, a lease ended, the consumer changed, an acknowledgement failed, or a
    seek moved the subscription. After a rewind, and for another consumer, no unacknowledged message is left out.
    """
    for life, calls in _by_incarnation(facts, (Kind.EXCLUSIVE, Kind.FAILOVER)):
        walk = _InOrder(facts, life)
        for call in calls:
            problem = walk.step(call)
            if problem is not None:
                yield _breach("order-exclusive", f"{call} {problem}", call)
                break


class _InOrder:
    """Follows the deliveries of one incarnation of a subscription that keeps the order."""

    def __init__(self, facts: Facts, life: Life) -> None:
        self._facts = facts
        self._life = life
        self._calls: list[Call] = []
        self._last: Key | None = None
        self._repeated: set[Key] = set()

    def step(self, call: Call) -> str | None:
        """Return what is wrong with the deliveries of `call`; None: nothing."""
        at = call.settled
        assert at is not None
        keys = [one.key for one in call.deliveries]
        if keys != sorted(set(keys)):
            return f"delivered {', '.join(map(id_text, keys))}: not in the order of the topic"
        if _is_repeat(call, self._calls):
            self._repeated.update(keys)
            return None
        before = self._last
        if before is not None and keys[0] <= before:
            if not self._may_rewind(call):
                return f"delivered {id_text(keys[0])} after {id_text(before)} without a reason to deliver it again"
            before = None
        if self._calls and _consumer(self._calls[-1]) != _consumer(call):
            before = None  # what the former consumer held is returned
        for key in keys:
            for missing in self._facts.between(self._life.id.topic, before, key):
                if self._is_missing(missing, call, at):
                    return (
                        f"delivered {id_text(key)}, but not {id_text(missing.key)} ({missing.payload.text!r}) before it"
                    )
            before = key
        self._last = before
        self._repeated.clear()
        self._calls.append(call)
        return None

    def _is_missing(self, message: Stored, call: Call, at: Instant) -> bool:
        facts, life = self._facts, self._life
        if message.key in self._repeated or not facts.is_owed(life, message):
            return False
        stored, started = message.call.settled, call.started
        if stored is None or started is None or stored > started:
            return False
        return not facts.is_exempt(life, message, at)

    def _may_rewind(self, call: Call) -> bool:
        last, at = self._calls[-1], call.settled
        assert last.settled is not None
        assert at is not None
        if _consumer(last) != _consumer(call) or any(_expires(one, at) for one in self._calls):
            return True
        request = call.request
        if isinstance(request, Receive) and request.kind is Kind.FAILOVER:  # another one may have been active meanwhile
            others = {_consumer(one) for one in self._life.calls if isinstance(one.request, Receive)}
            if any(_may_have_joined(self._life, one, last, at) for one in others - {_consumer(call)}):
                return True
        for other in self._life.calls:
            if other.incarnation != call.incarnation or other.started is None or other.started > at:
                continue
            if other.settled_before(last.settled):
                continue
            request = other.request
            if isinstance(request, Return | Leave | Seek) or (isinstance(request, Receive) and request.redeliver):
                return True
            if isinstance(request, Acknowledge) and not (other.is_done and other.settled_before(at)):
                return True
        return False


def order_per_key(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """Key_Shared: messages of one key go to one consumer at a time, in the order of the topic.

    A returned message is delivered again before later ones of its key. Delayed messages have no order when they are
    delivered for the first time.
    """
    for life, calls in _by_incarnation(facts, (Kind.KEY_SHARED,)):
        returns = [one for one in life.calls if isinstance(one.request, Return)]
        held: dict[str, dict[Key, Call]] = defaultdict(dict)
        for call in calls:
            for key, text, _ in call.deliveries:
                routing = facts.payloads[text].key if text in facts.payloads else None
                if routing is None:
                    continue
                of_key = held[routing]
                for earlier in facts.between(life.id.topic, None, key):
                    if earlier.payload.key == routing and facts.is_owed(life, earlier):
                        holder = of_key.get(earlier.key)
                        if holder is None and (facts.payloads[text].is_delayed or earlier.payload.is_delayed):
                            continue
                        why = _overtakes(facts, life, call, earlier, holder, returns)
                        if why is not None:
                            problem = f"{call} delivered {id_text(key)} of key {routing!r} {why}"
                            yield _breach("order-per-key", problem, call)
                of_key[key] = call


def _overtakes(
    facts: Facts, life: Life, call: Call, earlier: Stored, holder: Call | None, returns: list[Call]
) -> str | None:
    """Return why `call` may not deliver a message after `earlier`, one of the same key; None: it may.

    `holder`: the call that delivered `earlier` last. `returns`: the negative acknowledgements of the subscription.
    """
    stored, at = earlier.call.settled, call.settled
    assert at is not None
    if stored is None or call.started is None or stored > call.started:
        return None
    if holder is not None and _consumer(holder) != _consumer(call) and _holds(life, holder, earlier.key, at):
        return f"while {holder} held {id_text(earlier.key)}"
    if facts.is_exempt(life, earlier, at):
        return None
    if holder is None:
        return f"before {id_text(earlier.key)}"
    for one in returns:
        if holder.settled_before(one.sent) and _has_returned(life, one, earlier.key, call):
            return f"before {id_text(earlier.key)}, which {one} had returned"
    return None


def one_active_consumer(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """Exclusive and Failover: another consumer receives only after the session of the former one has ended.

    A Failover subscription chooses anew when a consumer joins: the former one may stay connected if the other one has
    joined. A consumer that was there already never replaces one that stays: of two, the same one is always preferred.
    """
    for life, calls in _by_incarnation(facts, (Kind.EXCLUSIVE, Kind.FAILOVER)):
        for before, call in pairwise(calls):
            former, at = _consumer(before), call.settled
            if former == _consumer(call):
                continue
            assert at is not None
            assert before.settled is not None
            assert isinstance(call.request, Receive)
            if call.request.kind is Kind.FAILOVER and _may_have_joined(life, _consumer(call), before, at):
                continue
            own = [one for one in life.calls if one.incarnation == call.incarnation and one.started is not None]
            has_left = any(
                isinstance(one.request, Leave)
                and one.request.consumer == former
                and one.started < at  # type: ignore[operator]  # `own` has only started calls
                and not one.settled_before(before.settled)
                for one in own
            )
            last = max(
                one.settled.time_s + one.request.session_ttl_s
                for one in own
                if isinstance(one.request, Receive)
                and one.request.consumer == former
                and one.is_done
                and one.settled is not None
                and one.settled < at
            )
            if not has_left and last > at.time_s + SLACK_S:
                problem = f"{call} delivered while {former} was connected until {last:.3f} s ({before})"
                yield _breach("one-active-consumer", problem, before, call)


def handover_waits(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """Failover: what a consumer holds is delivered to another one after HANDOVER_S, or when something returned it.

    The other one cannot have become active before the delivery, so the time since then is at least HANDOVER_S. One
    message that is returned, a lease that ends, or an acknowledgement that fails returns all of them.
    """
    for life, calls in _by_incarnation(facts, (Kind.FAILOVER,)):
        held: dict[Key, Call] = {}
        for number, call in enumerate(calls):
            at = call.settled
            assert at is not None
            for key, text, _ in call.deliveries:
                holder = held.get(key)
                held[key] = call
                if holder is None or _consumer(holder) == _consumer(call):
                    continue
                assert holder.settled is not None
                waited_s = at.time_s - holder.settled.time_s
                if waited_s >= HANDOVER_S - SLACK_S or any(_expires(one, at) for one in calls[:number]):
                    continue
                if not _may_be_returned(life, holder, at):
                    problem = (
                        f"{call} delivered {text!r} ({id_text(key)}) {waited_s:.3f} s after {holder}, "
                        "which still holds it"
                    )
                    yield _breach("handover-waits", problem, holder, call)


def _may_be_returned(life: Life, holder: Call, at: Instant) -> bool:
    """Return whether anything may have returned what a consumer of a failover subscription held, before `at`."""
    consumer, since = _consumer(holder), holder.started
    assert since is not None
    for call in life.calls:
        if call is holder or call.started is None or call.started > at or call.settled_before(since):
            continue
        request = call.request
        if isinstance(request, Return | Seek):
            return True
        if isinstance(request, Acknowledge) and not (call.is_done and call.settled_before(at)):
            return True
        if isinstance(request, Leave) and request.consumer == consumer:
            return True
        # A call without messages may have returned some, because its client has gone.
        if isinstance(request, Receive) and request.consumer == consumer and (request.redeliver or not call.deliveries):
            return True
    return False


def one_lease(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """Shared, Key_Shared: a message is delivered again only after the lease of its former delivery has ended.

    The other types return all messages together; `order_exclusive` checks the reasons.
    """
    for life, calls in _by_incarnation(facts, (Kind.SHARED, Kind.KEY_SHARED)):
        held: dict[Key, Call] = {}
        earlier: list[Call] = []
        for call in calls:
            at = call.settled
            assert at is not None
            is_repeat = _is_repeat(call, earlier)
            earlier.append(call)
            for key, text, _ in call.deliveries:
                holder = held.get(key)
                held[key] = call
                if holder is None or (is_repeat and _consumer(holder) == _consumer(call)):
                    continue
                if _holds(life, holder, key, at):
                    problem = f"{call} delivered {text!r} ({id_text(key)}), which {holder} still holds"
                    yield _breach("one-lease", problem, holder, call)


def never_early(facts: Facts, rules: Rules) -> Iterator[Breach]:
    """Shared, Key_Shared: a delayed message is not delivered before its time.

    The other types keep the order of the topic instead.
    """
    for _, calls in _by_incarnation(facts, (Kind.SHARED, Kind.KEY_SHARED)):
        for call in calls:
            for key, text, _ in call.deliveries:
                due_s = facts.payloads[text].deliver_at_s if text in facts.payloads else None
                if due_s is not None and call.settled is not None and call.settled.time_s < due_s - rules.early_s_max:
                    problem = (
                        f"{call} delivered {text!r} ({id_text(key)}) {due_s - call.settled.time_s:.3f} s too early"
                    )
                    yield _breach("never-early", problem, call)


def redelivery_counts_never_go_down(facts: Facts, rules: Rules) -> Iterator[Breach]:
    """The redelivery count of a message does not decrease, unless a seek starts anew.

    Without durable counts, it starts at 0 with each incarnation.
    """
    for life in facts.lives.values():
        seen: dict[tuple[Key, int | None], tuple[int, Call]] = {}
        for call in life.receives:
            for key, text, count in call.deliveries:
                scope = (key, None if rules.durable_counts else call.incarnation)
                highest, source = seen.get(scope, (0, call))
                if source.settled is not None and any(not one.settled_before(source.settled) for one in life.seeks):
                    highest = 0
                if count < highest and not (rules.durable_counts and facts.was_stale(call, at=call.settled)):
                    problem = f"{call} delivered {text!r} ({id_text(key)}) with count {count}, {source} with {highest}"
                    yield _breach("redelivery-counts-never-go-down", problem, source, call)
                seen[scope] = (max(count, highest), call if count >= highest else source)


def redelivery_counts_match_returns(facts: Facts, rules: Rules) -> Iterator[Breach]:
    """Each return that was answered counts, and nothing counts but returns and leases that ended.

    A consumer that leaves does not count. A seek may start anew.
    """
    for life in facts.lives.values():
        returns: dict[Key, list[Call]] = defaultdict(list)
        for call in life.calls:
            if isinstance(call.request, Return):
                for key in call.request.keys:
                    returns[key].append(call)
        earlier: dict[Key, list[Call]] = defaultdict(list)
        for call in life.receives:
            at = call.settled
            assert at is not None

            def is_same(one: Call, call: Call = call) -> bool:
                return rules.durable_counts or one.incarnation == call.incarnation

            for key, text, count in call.deliveries:
                ended = [one for one in earlier[key] if is_same(one) and _expires(one, at)]
                given = [one for one in returns[key] if is_same(one) and one.sent < at]
                certain = [one for one in given if _has_returned(life, one, key, call)]
                if not len(certain) <= count <= len(ended) + len(given):
                    problem = (
                        f"{call} delivered {text!r} ({id_text(key)}) with count {count}; it was returned "
                        f"{len(certain)} to {len(given)} times, and {len(ended)} leases may have ended"
                    )
                    yield _breach("redelivery-counts-match-returns", problem, call)
                earlier[key].append(call)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _by_incarnation(facts: Facts, kinds: tuple[Kind, ...]) -> Iterator[tuple[Life, list[Call]]]:
    """Return the calls that delivered messages, by subscription and incarnation, in the order of the broker."""
    for life in facts.lives.values():
        found: dict[int, list[Call]] = defaultdict(list)
        for call in life.receives:
            request = call.request
            assert isinstance(request, Receive)
            if request.kind in kinds and call.incarnation is not None and call.settled is not None:
                found[call.incarnation].append(call)
        for calls in found.values():
            yield life, calls


def _consumer(call: Call) -> str:
    assert isinstance(call.request, Receive)
    return call.request.consumer


def _may_have_joined(life: Life, consumer: str, since: Call, until: Instant) -> bool:
    """Return whether the consumer may have joined after `since` was started, at the broker that served it."""
    own = [one for one in life.calls if one.incarnation == since.incarnation and one.started is not None]
    return any(
        isinstance(one.request, Receive)
        and one.request.consumer == consumer
        and one.started is not None
        and since.started is not None
        and since.started < one.started < until
        and not _is_connected(own, consumer, one.started)
        for one in own
    ) or _is_in_progress(own, consumer, since)


def _is_in_progress(own: list[Call], consumer: str, since: Call) -> bool:
    """Return whether a call of the consumer that may have connected it was in progress when `since` started."""
    at = since.started
    assert at is not None
    return not _is_connected(own, consumer, at) and any(
        isinstance(one.request, Receive)
        and one.request.consumer == consumer
        and one.started is not None
        and one.started < at
        and not one.settled_before(at)
        for one in own
    )


def _is_connected(own: list[Call], consumer: str, at: Instant) -> bool:
    """Return whether the consumer certainly has a session at `at`: it called before, and neither left nor was idle."""
    return any(
        isinstance(one.request, Receive)
        and one.request.consumer == consumer
        and one.is_done
        and one.settled is not None
        and one.started is not None
        and one.settled < at
        and one.settled.time_s + one.request.session_ttl_s > at.time_s + SLACK_S
        and not any(
            isinstance(other.request, Leave)
            and other.request.consumer == consumer
            and other.started is not None
            and other.started < at
            and not other.settled_before(one.started)
            for other in own
        )
        for one in own
    )


def _is_repeat(call: Call, earlier: list[Call]) -> bool:
    """Return whether a call may have repeated the answer to an earlier call with the same request id."""
    request = call.request
    assert isinstance(request, Receive)
    if request.request_id is None:
        return False
    keys = {one.key for one in call.deliveries}
    return any(
        isinstance(one.request, Receive)
        and (one.request.consumer, one.request.request_id) == (request.consumer, request.request_id)
        and keys <= {delivered.key for delivered in one.deliveries}
        for one in earlier
    )


def _expires(call: Call, at: Instant) -> bool:
    """Return whether the leases of a call have reached their time at `at`."""
    assert isinstance(call.request, Receive)
    assert call.settled is not None
    return call.settled.time_s + call.request.ack_timeout_s <= at.time_s + SLACK_S


def _has_returned(life: Life, call: Call, key: Key, before: Call) -> bool:
    """Return whether a call certainly returned the message before another call, which the same broker served."""
    return (
        call.is_done
        and call.incarnation == before.incarnation
        and before.started is not None
        and call.settled_before(before.started)
        and isinstance(call.result, tuple)
        and key in call.result
        and all(seek.settled_before(call.sent) or seek.sent > (before.settled or before.sent) for seek in life.seeks)
    )


def _holds(life: Life, holder: Call, key: Key, at: Instant) -> bool:
    """Return whether the consumer of an earlier delivery certainly still holds the message at `at`."""
    if _expires(holder, at):
        return False
    consumer, since = _consumer(holder), holder.settled
    assert since is not None
    return not any(
        call.incarnation == holder.incarnation
        and call.started is not None
        and call.started < at
        and not call.settled_before(since)
        and releases(call, consumer, key)
        for call in life.calls
    )


def _breach(invariant: str, text: str, *calls: Call) -> Breach:
    return Breach(invariant, text, tuple(call.number for call in calls))
