"""Judge producers that repeat each request until it succeeds, while connections are cut and brokers are killed. Pure.

| error     | meaning                                                                                                  |
|-----------|----------------------------------------------------------------------------------------------------------|
| lost      | a message that a request was answered as stored, and that is not in the topic                            |
| twice     | a message that is in the topic more than once                                                            |
| order     | messages of one producer (and of one key, if the topic has partitions) that are not in the order in      |
|           | which it sent them                                                                                       |
| phantom   | a message in the topic that no request had sent                                                          |
| other-id  | two answers with different ids for one message, or an id under which the topic has another message       |
| refused   | an answer that a correct request must not get                                                            |
| undone    | a request that did not succeed before the end of the run                                                 |
| missed    | a message in the topic that a consumer of the whole topic never got                                      |
| delivered | a message that a consumer got and that is not in the topic under this id                                 |
| late      | a message that the consumer which received afterwards got first after a later one of its key             |

The history (`history`) has one `produce` for each attempt, with the number of its request; it has failed if it was
refused. The id `-1:-1:-1:-1` stands for a message of a producer with sequence ids whose id is not known any more. The
last complete `read` is the content of the topic, or of the partition that it names: rows `[id, producer, sequence,
key]`; the last member may be missing. `receive` is a call of a consumer: LIVE during the load, AFTERWARDS after it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_e2e.judging.history import Record

UNKNOWN_ID: Final = "-1:-1:-1:-1"
EXAMPLES_MAX: Final = 5
LIVE: Final = "live"
"""The consumer that receives while brokers are killed."""
AFTERWARDS: Final = "afterwards"
"""The consumer that receives everything at the end."""


@dataclass(slots=True)
class Repeats:
    """The judgement, and figures."""

    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    messages: int = 0
    """Messages in the topic."""
    requests: int = 0
    attempts: int = 0
    unanswered: int = 0
    """Attempts without a definite answer."""
    known_again: int = 0
    """Messages whose id was not known any more in an answer."""
    partitions: int = 0
    """Partitions that were read; 0: the topic has none."""
    deliveries: int = 0
    """Messages that consumers of the whole topic got."""
    kills: int = 0
    cuts: Counter[str] = field(default_factory=Counter)
    """Connections by what the proxy did to them."""

    def add(self, kind: str, text: str) -> None:
        self.errors[kind] += 1
        if self.errors[kind] <= EXAMPLES_MAX:
            self.examples.append(f"{kind}: {text}")

    @property
    def verdict(self) -> str:
        """GOOD, BAD, or INCOMPLETE: without errors, and without cuts or messages."""
        if self.errors:
            return "BAD"
        return "GOOD" if self.messages and self.unanswered and self.cuts else "INCOMPLETE"

    def __str__(self) -> str:
        errors = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.errors.items())) or "no errors"
        cuts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.cuts.items()))
        topic = f" in {self.partitions} partitions, {self.deliveries:,} deliveries" if self.partitions else ""
        return (
            f"{self.messages:,} messages{topic} of {self.requests:,} requests in {self.attempts:,} attempts, "
            f"{self.unanswered:,} of them without an answer; {self.kills:,} kills; connections: {cuts}; {errors}"
        )


def judge_repeats(records: Iterable[Record]) -> Repeats:
    found = Repeats()
    open_attempts: dict[int, Mapping[str, Any]] = {}
    sent: dict[tuple[str, int], int] = {}
    """The request of each message."""
    answered: dict[tuple[str, int], str] = {}
    done: set[int] = set()
    attempts: Counter[int] = Counter()
    reading: dict[int, Mapping[str, Any]] = {}
    rows: dict[int | None, list[list[Any]]] = {}
    """Complete contents, by partition."""
    pages: dict[int | None, list[list[Any]]] = {}
    receiving: dict[int, str] = {}
    delivered: dict[str, list[list[Any]]] = defaultdict(list)
    for record in records:
        values = record.values
        if record.type == "invoke" and values["op"] == "produce":
            open_attempts[record.n] = values
            attempts[values["request"]] += 1
            for sequence in values["sequences"]:
                sent[values["process"], sequence] = values["request"]
        elif record.type == "invoke" and values["op"] == "read":
            reading[record.n] = values
        elif record.type == "invoke" and values["op"] == "receive":
            receiving[record.n] = values["process"]
        elif record.n in receiving:
            delivered[receiving.pop(record.n)] += values["messages"] if record.type == "ok" else ()
        elif record.n in open_attempts:
            attempt = open_attempts.pop(record.n)
            if record.type == "unknown":
                found.unanswered += 1
            elif record.type == "failed":
                found.add("refused", f"{attempt['process']} {attempt['sequences']}: {values['error']}")
            elif record.type == "ok":
                done.add(attempt["request"])
                for sequence, message_id in zip(attempt["sequences"], values["ids"], strict=True):
                    message = attempt["process"], sequence
                    if message_id == UNKNOWN_ID:
                        found.known_again += 1
                        answered.setdefault(message, UNKNOWN_ID)
                    elif answered.get(message, UNKNOWN_ID) not in (UNKNOWN_ID, message_id):
                        found.add("other-id", f"{message} was answered as {answered[message]}, then as {message_id}")
                    else:
                        answered[message] = message_id
        elif record.n in reading and record.type == "ok":
            read = reading.pop(record.n)
            partition = read.get("partition")
            if read["start"] == "earliest":
                pages[partition] = []
            pages[partition] += values["messages"]
            if values["end"]:
                rows[partition] = pages[partition]
        elif record.type == "fault-begin" and values["fault"] == "kill":
            found.kills += 1
        elif record.type == "observation" and values["what"] == "cuts":
            found.cuts.update(values["cuts"])
    found.requests, found.attempts = len(attempts), attempts.total()
    for request in attempts.keys() - done:
        found.add("undone", f"request {request}")
    if not rows or rows.keys() != pages.keys():
        found.add("lost", "the topic could not be read")
        return found
    found.partitions = len(rows) if None not in rows else 0
    stored = [row for some in rows.values() for row in some]
    _judge_rows(found, stored, sent, answered)
    for consumer, got in delivered.items():
        _judge_deliveries(found, consumer, got, stored)
    return found


def _judge_deliveries(found: Repeats, consumer: str, got: list[list[Any]], stored: list[list[Any]]) -> None:
    found.deliveries += len(got)
    places = {row[0]: tuple(row[1:3]) for row in stored}
    seen: set[str] = set()
    last: dict[tuple[str, str], int] = {}
    for message_id, producer, sequence, key in got:
        if places.get(message_id) != (producer, sequence):
            found.add("delivered", f"{consumer} got {(producer, sequence)} as {message_id}")
        if message_id in seen:
            continue
        seen.add(message_id)
        if consumer == AFTERWARDS and sequence <= last.get((producer, key), -1):
            found.add("late", f"{consumer} got {(producer, sequence)} of {key} after {last[producer, key]}")
        last[producer, key] = max(sequence, last.get((producer, key), -1))
    for message_id in places.keys() - seen:
        found.add("missed", f"{consumer} did not get {places[message_id]} at {message_id}")


def _judge_rows(
    found: Repeats, rows: list[list[Any]], sent: dict[tuple[str, int], int], answered: dict[tuple[str, int], str]
) -> None:
    found.messages = len(rows)
    ids: dict[tuple[str, int], list[str]] = defaultdict(list)
    last: dict[tuple[str, str], int] = {}
    for message_id, producer, sequence, *keys in rows:
        message = producer, sequence
        source = (producer, str(keys[0]) if found.partitions else "")
        ids[message].append(message_id)
        if message not in sent:
            found.add("phantom", f"{message} at {message_id}")
        elif len(ids[message]) == 1:
            if sequence <= last.get(source, -1):
                found.add("order", f"{message} at {message_id} after {last[source]}")
            last[source] = max(sequence, last.get(source, -1))
    for message, places in ids.items():
        if len(places) > 1:
            found.add("twice", f"{message} at {', '.join(places)}")
        elif answered.get(message, UNKNOWN_ID) not in (UNKNOWN_ID, places[0]):
            found.add("other-id", f"{message} was answered as {answered[message]} and is at {places[0]}")
    for message in answered.keys() - ids.keys():
        found.add("lost", f"{message} was answered as {answered[message]}")
