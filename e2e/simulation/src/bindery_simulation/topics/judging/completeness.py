"""Rules about what every subscription must receive, judged at the end of a run.

At its end, all faults are undone and a consumer receives and acknowledges whatever is left in each subscription. Hence
each message that a subscription was owed has been delivered, and its acknowledgement was attempted.
"""

from collections.abc import Iterator

from bindery_simulation.topics.judging.facts import Facts, Life, Stored
from bindery_simulation.topics.judging.history import Breach, Key, Rules, id_text


def acknowledged_is_delivered(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A message that was acknowledged to its producer is delivered to each subscription, until it is acknowledged."""
    for life, message in _owed(facts):
        delivered = _delivered(life)
        name = f"{message.payload.text!r} ({id_text(message.key)}) of {message.call}"
        if facts.may_be_skipped(life, message, facts.end):
            continue
        if message.key not in delivered:
            problem = f"{name} was not delivered to {life.id.name}"
        elif next(facts.acks_of(life, message.key), None) is None:
            problem = f"{name} was delivered to {life.id.name}, but not again, although it was never acknowledged"
        else:
            continue
        yield Breach("acknowledged-is-delivered", problem, (message.call.number,))


def seek_delivers_again(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """After a seek, the messages from its target on are delivered again, also those that were acknowledged before."""
    for life, message in _owed(facts):
        if facts.is_exempt(life, message, facts.end):
            continue
        if next(facts.acks_of(life, message.key), None) is not None:
            problem = f"{message.payload.text!r} ({id_text(message.key)}) was not delivered again to {life.id.name}"
            yield Breach("seek-delivers-again", problem, (message.call.number,))


def trim_keeps_unacknowledged(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A ledger is deleted only after each subscription has acknowledged all its messages, or has moved behind them."""
    for event in facts.history.trimmed:
        for life in facts.lives.values():
            if life.id.topic != event.topic or not life.exists_at(event.at):
                continue
            for message in facts.messages(event.topic):
                if message.key[0] not in event.ledgers or not facts.is_owed(life, message):
                    continue
                if not facts.is_exempt(life, message, event.at):
                    problem = (
                        f"ledger {message.key[0]} was deleted at {event.at.time_s:.3f} s with {message.payload.text!r} "
                        f"({id_text(message.key)}), which {life.id.name} had not acknowledged"
                    )
                    yield Breach("trim-keeps-unacknowledged", problem, (message.call.number,))


def _owed(facts: Facts) -> Iterator[tuple[Life, Stored]]:
    for life in facts.lives.values():
        if life.since is not None and life.until is None:
            for message in facts.messages(life.id.topic):
                if facts.is_owed(life, message):
                    yield life, message


def _delivered(life: Life) -> set[Key]:
    return {one.key for call in life.receives for one in call.deliveries}
