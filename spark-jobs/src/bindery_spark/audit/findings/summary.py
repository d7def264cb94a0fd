"""Summary of a run: verdict, coverage and counts, as JSON, as text, and as Prometheus metrics. Pure.

The last line of the text is for scripts: `bindery <cluster id> is HEALTHY|UNDER-REPLICATED|CORRUPT|INCOMPLETE`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bindery_metadata.recovery.last_audits import LastAudit

from bindery_spark.audit.findings.diff import finding_text
from bindery_spark.audit.findings.findings import WHAT_TO_DO, Kind, Severity, Verdict, verdict_of

FINDINGS_SHOWN_MAX: Final = 50
"""Maximum number of findings in the text."""
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class BookieCoverage:
    """Coverage of one bookie: copies of entries, payload bytes."""

    bookie: str
    copies: int
    unknown: int
    bytes: int
    reason: str | None = None
    """One of the reasons why the bookie did not answer for the unknown copies."""
    unlisted: str | None = None
    """Why orphaned data was not checked; None: it was, or the run does not check it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of one run. Times are in ms since 1970, sizes in bytes."""

    run_id: str
    cluster_id: str
    level: str
    verdict: str
    exit_code: int
    began_ms: int
    ended_ms: int
    ledgers: int
    """Number of ledgers that were checked."""
    ledgers_skipped: int
    """Number of ledgers that were skipped because an earlier run verified them recently."""
    ledgers_verified: int
    """Number of ledgers that this run verified."""
    copies: int
    unknown: int
    bytes: int
    coverage: float
    """Fraction of the copies that were checked, 0..1; 1 if there are no copies."""
    oldest_verified_ms: int | None
    """Time of the oldest verification that the verdict depends on."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    severities: Mapping[str, int] = field(default_factory=dict)
    bookies: tuple[BookieCoverage, ...] = ()
    proposals: int = 0
    """Number of ledgers that `--apply` marks."""

    @property
    def seconds(self) -> float:
        return (self.ended_ms - self.began_ms) / 1000

    def to_json(self) -> dict[str, Any]:
        rate = self.copies / self.seconds if self.seconds > 0 else 0.0
        return {**asdict(self), "seconds": self.seconds, "copies_per_s": round(rate, 1)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Summary":
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "bookies": tuple(BookieCoverage(**one) for one in fields["bookies"])})


def summarize(findings: Iterable[Mapping[str, Any]], bookies: Sequence[BookieCoverage], **known: Any) -> Summary:
    """`known`: the fields that do not follow from findings and coverage."""
    kinds: Counter[str] = Counter()
    severities: Counter[str] = Counter()
    for finding in findings:
        kinds[finding["kind"]] += 1
        severities[finding["severity"]] += 1
    copies, unknown = sum(one.copies for one in bookies), sum(one.unknown for one in bookies)
    is_complete = unknown == 0 and not any(one.unlisted for one in bookies)
    verdict = verdict_of(severities, is_complete=is_complete)
    return Summary(
        **known,
        verdict=str(verdict),
        exit_code=int(verdict.exit_code),
        copies=copies,
        unknown=unknown,
        bytes=sum(one.bytes for one in bookies),
        coverage=1.0 if copies == 0 else (copies - unknown) / copies,
        kinds=dict(sorted(kinds.items())),
        severities=dict(sorted(severities.items())),
        bookies=tuple(bookies),
    )


def last_audit(summary: Summary) -> LastAudit:
    """The record of the run that the cluster stores."""
    return LastAudit(
        level=summary.level,
        run_id=summary.run_id,
        verdict=summary.verdict,
        exit_code=summary.exit_code,
        began_ms=summary.began_ms,
        ended_ms=summary.ended_ms,
        copies_expected=summary.copies,
        copies_verified=summary.copies - summary.unknown,
        bytes_read=summary.bytes,
        oldest_verified_ms=summary.oldest_verified_ms or summary.began_ms,
        kinds=summary.kinds,
        severities=summary.severities,
    )


def summary_text(summary: Summary, findings: Sequence[Mapping[str, Any]]) -> str:
    """The summary as text. `findings`: in any order."""
    lines = [
        f"audit {summary.run_id}, level {summary.level}",
        f"checked {summary.ledgers} ledgers, {summary.copies - summary.unknown} of {summary.copies} copies of entries"
        f" ({_percent(summary.coverage)}), {summary.bytes / MIB:.1f} MiB in {summary.seconds:.1f} s",
    ]
    if summary.ledgers_skipped:
        lines.append(f"skipped {summary.ledgers_skipped} ledgers that were verified recently")
    lines += [
        f"  {one.bookie}: {one.unknown} of {one.copies} copies were not checked: {one.reason}"
        for one in summary.bookies
        if one.unknown
    ]
    lines += [
        f"  {one.bookie}: orphaned data was not checked: {one.unlisted}" for one in summary.bookies if one.unlisted
    ]
    order = list(Severity)
    worst = sorted(findings, key=lambda f: -order.index(Severity(f["severity"])))
    lines += [f"  {finding_text(finding)}" for finding in worst[:FINDINGS_SHOWN_MAX]]
    if len(worst) > FINDINGS_SHOWN_MAX:
        lines.append(f"  and {len(worst) - FINDINGS_SHOWN_MAX} more, listed in report.html")
    lines += [f"{count} {kind}: {WHAT_TO_DO[Kind(kind)]}" for kind, count in summary.kinds.items()]
    lines.append(f"bindery {summary.cluster_id} is {Verdict(summary.verdict)}")
    return "\n".join(lines) + "\n"


def _percent(part: float) -> str:
    """Print 100 % only if the part is exactly 1."""
    return "100 %" if part == 1.0 else f"{min(part * 100, 99.99):.2f} %"


def metrics_text(summary: Summary) -> str:
    """The summary in Prometheus' text format."""
    lines: list[str] = []

    def metric(name: str, help_text: str, values: Iterable[tuple[Mapping[str, str], float | int]]) -> None:
        lines.extend((f"# HELP bindery_audit_{name} {help_text}", f"# TYPE bindery_audit_{name} gauge"))
        for labels, value in values:
            text = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"bindery_audit_{name}{'{' + text + '}' if text else ''} {value}")

    oldest_s = (summary.ended_ms - (summary.oldest_verified_ms or summary.began_ms)) / 1000
    per_s = summary.copies / summary.seconds if summary.seconds > 0 else 0.0
    metric("exit_code", "0 healthy, 1 under-replicated, 2 corrupt, 3 incomplete.", [({}, summary.exit_code)])
    metric("ended_seconds", "Unix time at which the run ended.", [({}, summary.ended_ms / 1000)])
    metric("duration_seconds", "Duration of the run.", [({}, summary.seconds)])
    metric("ledgers", "Ledgers checked.", [({}, summary.ledgers)])
    metric("ledgers_verified", "Ledgers verified.", [({}, summary.ledgers_verified)])
    metric("copies", "Copies of entries that the run had to check.", [({}, summary.copies)])
    metric("copies_per_second", "Copies of entries per second.", [({}, round(per_s, 1))])
    metric("bytes", "Payload bytes verified.", [({}, summary.bytes)])
    metric("coverage_ratio", "Fraction of the copies that were checked.", [({}, summary.coverage)])
    metric(
        "oldest_verification_seconds", "Age of the oldest verification that the verdict depends on.", [({}, oldest_s)]
    )
    metric("findings", "Findings by kind.", [({"kind": str(kind)}, summary.kinds.get(kind, 0)) for kind in Kind])
    metric(
        "bookie_copies_unknown",
        "Copies that the bookie did not answer for.",
        [({"bookie": one.bookie}, one.unknown) for one in summary.bookies],
    )
    metric(
        "bookie_unlisted",
        "1 if orphaned data could not be checked because the bookie did not list its ledgers.",
        [({"bookie": one.bookie}, int(one.unlisted is not None)) for one in summary.bookies],
    )
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
