"""Judge a recorded history. Pure: the input is a series of records; the time is linear.

Definitions follow. `verdict.KINDS` lists the kinds of errors.

A *message* is (producer, sequence). It is *acknowledged* if a response to one of its produces has its id, and *refused*
if all of its produces definitely failed. Otherwise its outcome is unknown, and the topic may contain it or not. The
*truth* of a topic is its last complete reading from earliest.

Order. If b was sent after a was acknowledged (by the runner's monotonic clock), a precedes b in the truth, whichever
producers sent them: a topic is one log. For one producer, which has one request in flight, this is the order of its
sequences. Messages of one request are in the request's order. A message of unknown outcome may be written at any time
after it was sent: it may come late, but never before a message that was acknowledged when it was sent.

An exclusive subscription delivers in the order of the truth. If it skips a message and delivers it later, that is an
error, unless a receive of that subscription was lost (unknown) shortly before: its response may have contained the
skipped message.

Copies. The truth may contain a message once for each produce that did not definitely fail. `traffic` sends nothing
twice.

A delivered message that is missing in the truth is lost if it was acknowledged, and otherwise a phantom: a message that
one reader received must not disappear.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bindery_e2e.judging import delivery_order
from bindery_e2e.judging.delivery_order import Stored
from bindery_e2e.judging.figures import Gaps, end_of
from bindery_e2e.judging.history import Record
from bindery_e2e.judging.observed import Observed, Row, Subscribed
from bindery_e2e.judging.verdict import KINDS, Finding, Judgement

Case = tuple[str, str]
"""Kind of error, and description."""
ABOUT_MESSAGES: Final = ("lost", "phantom", "duplicate", "reordered", "changed")
OF_ORDER: Final = ("out-of-order", "held-twice", "stuck", "unacknowledged")
"""Kinds that are judged for subscriptions whose observation `subscribed` has an order."""


def judge(records: Iterable[Record], *, required: Sequence[str] = ()) -> Judgement:
    """Judge a history. `required`: kinds that must have been judged for GOOD, in addition to those about messages.

    Raises HistoryError for invalid records, ValueError for an unknown kind.
    """
    return judge_observed(Observed(records), required=required)


def judge_observed(observed: Observed, *, required: Sequence[str] = ()) -> Judgement:
    """As `judge`, for an index that was built before."""
    unheard = [kind for kind in required if kind not in KINDS]
    if unheard:
        raise ValueError(f"no such kind of verdict: {', '.join(unheard)}; there are {', '.join(KINDS)}")
    findings = {kind: Finding(kind) for kind in KINDS}
    for kind, text in find(observed):
        findings[kind].add(text)
    judged, unjudged = coverage(observed)
    missing = [
        f"{kind} could not be judged: {unjudged[kind]}"
        for kind in KINDS
        if kind in unjudged
        and (kind in required or kind in ABOUT_MESSAGES or (kind == "undelivered" and observed.subscriptions))
    ]
    if not any(sent.acknowledged for sent in observed.sent.values()):
        missing.append("no message was acknowledged: a run without load proves nothing")
    missing += [str(values["reason"]) for _, values in observed.series.get("incomplete", ())]
    found = [finding for finding in findings.values() if finding.count]
    return Judgement(found, judged, unjudged, missing, dict(observed.counts))


def find(observed: Observed) -> Iterator[Case]:
    """Find all errors."""
    for stray in observed.strays:
        yield stray.kind, stray.text
    for topic, truth in observed.truth.items():
        yield from _copies(observed, topic, truth)
        yield from _order(observed, topic, truth)
    yield from _lost(observed)
    for subscribed in observed.subscriptions.values():
        yield from _deliveries(observed, subscribed)
        yield from _undelivered(observed, subscribed)
        yield from _delivery_order(observed, subscribed)
        yield from _durability(observed, subscribed)
    yield from _cluster(observed)
    yield from _faults(observed)


def coverage(observed: Observed) -> tuple[dict[str, int], dict[str, str]]:
    """(kind -> number of checked items, kind -> why it could not be judged)."""
    judged: dict[str, int] = {}
    unjudged: dict[str, str] = {}
    unread = [topic for topic in observed.topics if topic not in observed.truth]
    read = sum(map(len, observed.truth.values()))
    for kind in ABOUT_MESSAGES:
        judged[kind] = observed.counts["acknowledged"] if kind == "lost" else read + observed.counts["delivered"]
        if unread or not observed.truth:
            unjudged[kind] = f"no complete reading of {', '.join(unread) or 'any topic'}"
    judged["redelivered"] = observed.counts["delivered"]
    undrained = [str(s) for s in observed.subscriptions.values() if s.drained is None]
    judged["undelivered"] = sum(len(s.first) for s in observed.subscriptions.values())
    if undrained or not observed.subscriptions:
        unjudged["undelivered"] = f"not drained: {', '.join(undrained) or 'no subscription was there'}"
    kept = [s.durability for s in observed.subscriptions.values()]
    judged["count-fell"] = sum(durability.counted for durability in kept)
    judged["inconsistent"] = sum(durability.unknown for durability in kept)
    if not judged["count-fell"]:
        unjudged["count-fell"] = "no message was delivered again"
    if undrained or not kills_of(observed):
        unjudged["inconsistent"] = "a subscription was not drained, or no broker was killed"
    ordered = [s.consuming for s in observed.subscriptions.values() if s.consuming is not None]
    for kind in OF_ORDER:
        judged[kind] = sum(len(consuming.deliveries) for consuming in ordered)
        if not ordered:
            unjudged[kind] = "no subscription whose order is to be judged"
    judged["stuck"] = int(sum(delivery_order.judged_s(consuming) for consuming in ordered))
    if ordered and not judged["stuck"]:
        unjudged["stuck"] = "at no time, all consumers had demand for more than 2 s"
    for kind, what in (("diverged", "replicas"), ("under-replicated", "under-replicated"), ("not-ready", "ready")):
        if what in observed.last:
            judged[kind] = int(observed.last[what].get("compared", 1))
        else:
            unjudged[kind] = f"not checked: no observation {what!r}"
    if judged.get("diverged") == 0:
        unjudged["diverged"] = "no entry was compared"
    offered = [seen for seen in observed.faults.values() if seen.outcome != "not offered"]
    judged["fault-failed"] = len(offered)
    for kind, limit in (("copied-needlessly", "entries_copied_max"), ("unavailable", "gap_s_max")):
        judged[kind] = sum(limit in seen.values for seen in offered)
        if not judged[kind]:
            unjudged[kind] = f"no fault declared {limit}"
    if any("entries_copied_max" in seen.values and "entries_copied" not in seen.values for seen in offered):
        unjudged["copied-needlessly"] = "a fault that declared entries_copied_max ended without entries_copied"
    return judged, unjudged


# -- messages ----------------------------------------------------------------------------------------------------------


def _copies(observed: Observed, topic: str, truth: Sequence[Row]) -> Iterator[Case]:
    """Find phantom, changed (payload) and duplicate: check each row, and the number of copies of each message."""
    ids: set[str] = set()
    copies: Counter[tuple[str, int]] = Counter()
    for row in truth:
        if row.id in ids:
            yield "duplicate", f"{topic}: {row} was read twice under this id"
            continue
        ids.add(row.id)
        sent = observed.sent.get(row.key)
        if sent is None or sent.topic != topic:
            yield "phantom", f"{topic}: {row}, which no producer sent there"
            continue
        if sent.digest != row.digest:
            yield "changed", f"{topic}: {row}: payload {row.digest}, sent was {sent.digest} (operation {sent.request})"
        copies[row.key] += 1
        if sent.copies_max == 0:
            yield "phantom", f"{topic}: {row}, though all its produces failed (operation {sent.request})"
        elif copies[row.key] > sent.copies_max:
            allowed = f"at most {sent.copies_max} may be there"
            yield "duplicate", f"{topic}: {row} is copy {copies[row.key]}; {allowed} (operation {sent.request})"


def _order(observed: Observed, topic: str, truth: Sequence[Row]) -> Iterator[Case]:
    """Find reordered, from the end: no later row may have been acknowledged before a row was sent."""
    earliest: tuple[int, Row] | None = None
    request_index: dict[str, tuple[int, int, Row]] = {}
    for row in reversed(truth):
        sent = observed.sent.get(row.key)
        if sent is None or sent.topic != topic:
            continue
        if earliest is not None and earliest[0] < sent.sent_at:
            early_s = (sent.sent_at - earliest[0]) / 1e9
            yield (
                "reordered",
                f"{topic}: {row} comes before {earliest[1]}, acknowledged {early_s:.3f} s before it was sent",
            )
        acknowledged_at = next((at for text, at in sent.acknowledged if text == row.id), None)
        if acknowledged_at is None:
            continue
        if earliest is None or acknowledged_at < earliest[0]:
            earliest = acknowledged_at, row
        behind = request_index.get(row.producer)
        if behind is not None and behind[0] == sent.request and behind[1] < sent.index:
            yield "reordered", f"{topic}: {row} comes before {behind[2]} of the same request, {sent.request}"
        if behind is None or behind[0] != sent.request or sent.index < behind[1]:
            request_index[row.producer] = sent.request, sent.index, row


def _lost(observed: Observed) -> Iterator[Case]:
    """Find lost, and changed: the acknowledged id belongs to another message."""
    held = {topic: {row.id: row for row in truth} for topic, truth in observed.truth.items()}
    for sent in observed.sent.values():
        rows = held.get(sent.topic)
        if rows is None:
            continue
        for message_id, _ in sent.acknowledged:
            row = rows.get(message_id)
            if row is None:
                yield "lost", f"{sent.topic}: {message_id} of {sent}"
            elif row.key != (sent.producer, sent.sequence):
                yield "changed", f"{sent.topic}: {row} has the id of {sent}"


# -- subscriptions -----------------------------------------------------------------------------------------------------


def _deliveries(observed: Observed, subscribed: Subscribed) -> Iterator[Case]:
    """Find errors of deliveries.

    phantom: a delivered message was never acknowledged and is missing in the truth; changed: another message has the
    id; reordered: an exclusive subscription delivered a message late.
    """
    truth = observed.truth.get(subscribed.topic)
    if truth is None:
        return
    places = {row.id: place for place, row in enumerate(truth)}
    skipped: set[int] = set()
    next_place = 0
    for message_id, first in subscribed.first.items():
        place = places.get(message_id)
        if place is None:
            if (subscribed.topic, message_id) in observed.ids:
                continue  # counted as lost
            yield (
                "phantom",
                f"{_delivery(subscribed, message_id)} was delivered, but is missing at the end",
            )
            continue
        if first.sent is not None and (first.sent.producer, first.sent.sequence) != truth[place].key:
            yield "changed", f"{_delivery(subscribed, message_id)} was delivered; {truth[place]} is there at the end"
        if subscribed.kind != "exclusive":
            continue
        if place >= next_place:
            if not first.answer_lost:
                skipped.update(range(next_place, place))
            next_place = place + 1
        elif place in skipped:
            yield "reordered", f"{_delivery(subscribed, message_id)} was delivered after later messages"


def _delivery(subscribed: Subscribed, message_id: str) -> str:
    first = subscribed.first[message_id]
    return f"{subscribed}: {message_id} ({first.sent or 'not sent by the traffic'}) in operation {first.request}"


def _undelivered(observed: Observed, subscribed: Subscribed) -> Iterator[Case]:
    if subscribed.drained is None:
        return
    why = "" if subscribed.drained else "; its consumers did not drain it in time"
    for sent in observed.sent.values():
        if sent.topic != subscribed.topic or sent.sent_at < subscribed.since:
            continue
        for message_id, _ in sent.acknowledged:
            if message_id not in subscribed.first:
                yield "undelivered", f"{subscribed}: {message_id} of {sent}{why}"


def _delivery_order(observed: Observed, subscribed: Subscribed) -> Iterator[Case]:
    """Find the errors that `delivery_order` defines."""
    if subscribed.consuming is None:
        return
    stored: dict[str, Stored] = {}
    for sent in observed.sent.values():
        if sent.topic == subscribed.topic and sent.sent_at >= subscribed.since:
            for message_id, at in sent.acknowledged:
                stored[message_id] = Stored(message_id, sent.key, sent.sent_at, at, True, str(sent))
    for delivery in subscribed.consuming.deliveries:
        first = subscribed.first[delivery.message_id].sent
        if delivery.message_id not in stored and first is not None:
            stored[delivery.message_id] = Stored(
                delivery.message_id, first.key, first.sent_at, delivery.ended, False, str(first)
            )
    faults = sorted((seen.begin, end_of(seen, observed)) for seen in observed.faults.values())
    for kind, text in delivery_order.find(
        subscribed.consuming, stored.values(), drained=bool(subscribed.drained), faults=faults
    ):
        yield kind, f"{subscribed}: {text}"


def _durability(observed: Observed, subscribed: Subscribed) -> Iterator[Case]:
    """Find the errors that `durability` defines."""
    for kind, text in subscribed.durability.find(kills_of(observed), drained=bool(subscribed.drained)):
        yield kind, f"{subscribed}: {text}"


def kills_of(observed: Observed) -> list[int]:
    """Return the times at which a broker was dead because of a fault, ascending."""
    return sorted(seen.values["killed_at"] for seen in observed.faults.values() if "killed_at" in seen.values)


# -- the cluster -------------------------------------------------------------------------------------------------------


def _cluster(observed: Observed) -> Iterator[Case]:
    last = observed.last
    for text in last.get("replicas", {}).get("diverged", ()):
        yield "diverged", str(text)
    marked = last.get("under-replicated", {}).get("count", 0)
    if marked:
        yield "under-replicated", f"{marked} ledgers are marked in the last observation"
    ready = last.get("ready")
    if ready is not None and ready["ready"] < ready["wanted"]:
        yield "not-ready", f"{ready['ready']} of {ready['wanted']} in the last observation"


def _faults(observed: Observed) -> Iterator[Case]:
    gaps = Gaps(observed.requests)
    for number, seen in enumerate(observed.faults.values(), 1):
        where = f"fault {number}, {seen.fault} of {seen.target} (operation {seen.n})"
        if seen.outcome in ("", "failed"):
            yield "fault-failed", f"{where}: {seen.values.get('detail', 'it never ended')}"
        copied, copied_max = seen.values.get("entries_copied"), seen.values.get("entries_copied_max")
        if copied is not None and copied_max is not None and copied > copied_max:
            yield "copied-needlessly", f"{where}: {copied} entries were copied, at most {copied_max} may be"
        gap_s_max = seen.values.get("gap_s_max")
        if gap_s_max is not None and seen.outcome != "not offered":
            gap_s, topic = gaps.of_fault(seen, observed)
            if gap_s > gap_s_max:
                yield (
                    "unavailable",
                    f"{where}: {topic} had no successful produce for {gap_s:.1f} s, limit {gap_s_max} s",
                )
