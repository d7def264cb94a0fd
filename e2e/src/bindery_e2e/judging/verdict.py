"""Define the kinds of errors of a run, and its judgement."""

from dataclasses import dataclass, field
from typing import Final

EXAMPLES_MAX: Final = 10

KINDS: Final = {
    "lost": "acknowledged to its producer, and missing under that id at the end",
    "phantom": "read or delivered, but never sent, or refused to its producer, or missing at the end",
    "duplicate": "more copies than were sent, or one id given to two messages",
    "reordered": "stored or delivered before a message that was acknowledged before it was sent",
    "changed": "the payload differs from the one sent, or an acknowledged id belongs to another message",
    "undelivered": "acknowledged, and never delivered to a subscription that existed before it",
    "redelivered": "delivered again by a request made after its acknowledgement had been answered",
    "count-fell": "delivered with a lower redelivery count than before",
    "inconsistent": "an acknowledgement of unknown outcome held for a part of its messages, or only for a while",
    "out-of-order": "delivered before an earlier message of the key or topic that was not acknowledged nor held by it",
    "held-twice": "delivered while another consumer held a message of the key, or twice at once",
    "stuck": "a key or topic was not delivered for more than 2 s while all consumers had demand",
    "unacknowledged": "acknowledged to its producer, and by no consumer",
    "diverged": "replicas are missing on bookies, or differ from one another",
    "under-replicated": "ledgers still marked at the end",
    "not-ready": "pods or processes still not ready at the end",
    "copied-needlessly": "recovery copied more entries than the fault required",
    "unavailable": "a topic went without a successful produce for longer than the fault allows",
    "fault-failed": "a fault could not be injected, or the cluster did not recover from it",
}


@dataclass(slots=True)
class Finding:
    """Errors of one kind: their number, and the first cases."""

    kind: str
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(example)


@dataclass(slots=True)
class Judgement:
    """The result of a run.

    `judged`: kind -> number of checked items. `unjudged`: kind -> why it could not be judged; if the kind was required,
    the verdict is INCOMPLETE.
    """

    findings: list[Finding]
    judged: dict[str, int]
    unjudged: dict[str, str]
    missing: list[str]
    """Reasons why the run is incomplete."""
    counts: dict[str, int]

    @property
    def verdict(self) -> str:
        """BAD: at least one error was found. INCOMPLETE: no error was found, but not everything was checked."""
        if self.findings:
            return "BAD"
        return "INCOMPLETE" if self.missing else "GOOD"

    @property
    def is_good(self) -> bool:
        return self.verdict == "GOOD"

    def __str__(self) -> str:
        """The verdict, then one line for each example of an error and for each reason why the run is incomplete."""
        errors = [f"{found.kind} ({found.count}): {example}" for found in self.findings for example in found.examples]
        return "\n".join([self.verdict, *errors, *(f"incomplete: {reason}" for reason in self.missing)])
