"""What can be wrong with a run, and how a judgement says so."""

from dataclasses import dataclass, field
from typing import Final

EXAMPLES_MAX: Final = 10

KINDS: Final = {
    "lost": "acknowledged to its producer, and not there under that id at the end",
    "phantom": "read or delivered, though nobody sent it, or its producer was told that it failed, or it is gone since",
    "duplicate": "more copies than were sent, or one id given to two messages",
    "reordered": "stands, or was delivered, before a message that was acknowledged before it was sent",
    "changed": "another payload than was sent, or another message under an acknowledged id",
    "undelivered": "acknowledged, and never delivered to a subscription that was there before it",
    "redelivered": "delivered again by a request made after its acknowledgement had been answered",
    "diverged": "copies on bookies that are missing, or differ from one another",
    "under-replicated": "ledgers still marked at the end",
    "not-ready": "pods or processes still not ready at the end",
    "copied-needlessly": "healing copied more entries than the fault called for",
    "unavailable": "a topic went without a successful produce for longer than the fault allows",
    "fault-failed": "a fault could not be injected, or the cluster did not come back from it",
}


@dataclass(slots=True)
class Finding:
    """One kind of wrong: how often, and the first cases."""

    kind: str
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(example)


@dataclass(slots=True)
class Judgement:
    """`judged`: kind -> how many things were looked at; a kind that could not be judged is in `unjudged` with the
    reason, and makes the verdict INCOMPLETE when it was required."""

    findings: list[Finding]
    judged: dict[str, int]
    unjudged: dict[str, str]
    missing: list[str]
    """Reasons why this run proves less than it should."""
    counts: dict[str, int]

    @property
    def verdict(self) -> str:
        """BAD: something is certainly wrong. INCOMPLETE: nothing is, and something was not looked at."""
        if self.findings:
            return "BAD"
        return "INCOMPLETE" if self.missing else "GOOD"

    @property
    def is_good(self) -> bool:
        return self.verdict == "GOOD"
