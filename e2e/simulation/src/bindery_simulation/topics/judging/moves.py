"""Rules about messages that were moved to a retry topic or a dead-letter topic, judged at the end of a run.

These topics are read after all subscriptions have nothing left, so every move is settled. Nobody consumes them.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from bindery_simulation.topics.judging.facts import Facts, Life
from bindery_simulation.topics.judging.history import Breach, Call, Copied, Key, Retry, Rules, id_text

CLOCK_ERROR_S: Final = 0.07
"""Maximum difference in seconds between the clock of a broker, which dates the copies, and the time of the history."""


def one_copy(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A moved message has exactly one copy, a refused one none. After an unknown outcome there may be one.

    A seek delivers moved messages again, so that they may be moved once more.
    """
    for life, found in _with_copies(facts):
        moves = _moves(life)
        for key, copies in found.items():
            tries = [call for call in moves.get(key, ()) if call.may_be_done]
            if not tries:
                yield _breach(f"{_text(life, copies[0])}, although no request moved it", *moves.get(key, ()))
                continue
            first = min(call.sent for call in tries)
            seeks = sum(not seek.settled_before(first) for seek in life.seeks)
            if len(copies) > min(len(tries), 1 + seeks):
                yield _breach(f"{_text(life, copies[0])}, {len(copies)} times", *tries)
            sent = facts.stored[life.id.topic].get(key)
            if sent is not None and any(one.text != sent.payload.text for one in copies):
                yield _breach(f"{_text(life, copies[0])}, which is {sent.payload.text!r}", *tries)
        for key, calls in moves.items():
            done = [call for call in calls if call.is_done and isinstance(call.result, tuple) and key in call.result]
            if done and key not in found:
                yield _breach(f"{done[0]} moved {id_text(key)} of {life.id.name}, which has no copy", *done)


def move_loses_nothing(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A message that has no copy was acknowledged by somebody: a request to move it did not acknowledge it."""
    for life, found in _with_copies(facts):
        for key, calls in _moves(life).items():
            message = facts.stored[life.id.topic].get(key)
            if message is None or key in found or facts.may_be_skipped(life, message, facts.end):
                continue
            others = (call for call in facts.acks_of(life, key) if not isinstance(call.request, Retry))
            if any(call.may_be_done for call in calls) and next(others, None) is None:
                problem = f"{message.payload.text!r} ({id_text(key)}) of {life.id.name} was lost: it has no copy"
                yield Breach("move-loses-nothing", problem, tuple(call.number for call in calls))


def copies_in_order(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """The copies of one request are in the order in which it names the messages."""
    for life, found in _with_copies(facts):
        places: dict[Key, int] = {}
        for place, copy in enumerate(facts.copies[life.id]):
            places.setdefault(copy.origin, place)
        for call in life.calls:
            if isinstance(call.request, Retry) and call.is_done and isinstance(call.result, tuple):
                once = [key for key in call.result if len(found.get(key, ())) == 1]
                if [places[key] for key in once] != sorted(places[key] for key in once):
                    problem = f"{call} moved {', '.join(map(id_text, once))}, whose copies have another order"
                    yield Breach("copies-in-order", problem, (call.number,))


def moved_is_not_delivered(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """Once its copy is stored, a message is not delivered, whatever the request that moved it was answered.

    A delivery after the end of a request to move the message proves that this request will make no copy later, either.
    """
    for life, found in _with_copies(facts):
        if life.seeks:
            continue
        for call in life.receives:
            started = call.started
            if started is None or facts.was_stale(call, at=call.settled):
                continue
            for key, text, _ in call.deliveries:
                stored_at_s = min((one.stored_at_s for one in found.get(key, ())), default=None)
                if stored_at_s is not None and started.time_s > stored_at_s + CLOCK_ERROR_S:
                    problem = f"{call} delivered {text!r} ({id_text(key)}), whose copy was written at {stored_at_s} s"
                    yield Breach("moved-is-not-delivered", problem, (call.number,))
        moves = _moves(life)
        for key, copies in found.items():
            tries = [call for call in moves.get(key, ()) if call.may_be_done]
            if tries and all(_is_given_up(facts, life, key, call) for call in tries):
                problem = f"{_text(life, copies[0])}, but the message was delivered after each request to move it"
                yield Breach("moved-is-not-delivered", problem, tuple(call.number for call in tries))


def _with_copies(facts: Facts) -> Iterator[tuple[Life, dict[Key, list[Copied]]]]:
    for subscription, copies in facts.copies.items():
        life = facts.lives.get(subscription)
        if life is not None:
            found: dict[Key, list[Copied]] = defaultdict(list)
            for copy in copies:
                found[copy.origin].append(copy)
            yield life, dict(found)


def _moves(life: Life) -> dict[Key, list[Call]]:
    """Return the requests to move each message, those that were refused included."""
    found: dict[Key, list[Call]] = defaultdict(list)
    for call in life.calls:
        if isinstance(call.request, Retry):
            for key in call.request.keys:
                found[key].append(call)
    return found


def _is_given_up(facts: Facts, life: Life, key: Key, move: Call) -> bool:
    """Return whether the message was delivered after a request to move it had ended, by a broker that owned the topic.

    If the broker of the request was killed, only a later owner certainly delivers after the end.
    """
    for call in life.receives:
        if call.started is None or facts.was_stale(call, at=call.settled):
            continue
        if move.settled is not None:
            is_after = call.started > move.settled
        else:
            is_after = move.incarnation is not None and (call.incarnation or 0) > move.incarnation
        if is_after and any(one.key == key for one in call.deliveries):
            return True
    return False


def _text(life: Life, copy: Copied) -> str:
    return f"what was moved from {life.id.name} has {copy.text!r} ({id_text(copy.origin)})"


def _breach(text: str, *calls: Call) -> Breach:
    return Breach("one-copy", text, tuple(call.number for call in calls))
