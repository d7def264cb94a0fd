"""The text of a judgement lists its errors one per line, because logs and CI cut long lines."""

from bindery_e2e.judging.verdict import EXAMPLES_MAX, Finding, Judgement


def judgement(findings: list[Finding], missing: list[str]) -> Judgement:
    return Judgement(findings, judged={}, unjudged={}, missing=missing, counts={})


def finding(kind: str, *examples: str) -> Finding:
    found = Finding(kind)
    for example in examples:
        found.add(example)
    return found


def test_the_text_has_one_line_per_example_and_per_reason() -> None:
    found = judgement([finding("lost", "1:0", "1:7"), finding("fault-failed", "7: pending")], ["no replicas read"])
    assert str(found).splitlines() == [
        "BAD",
        "lost (2): 1:0",
        "lost (2): 1:7",
        "fault-failed (1): 7: pending",
        "incomplete: no replicas read",
    ]


def test_the_verdict_depends_on_errors_first_and_then_on_completeness() -> None:
    assert (judgement([], []).verdict, judgement([], []).is_good) == ("GOOD", True)
    assert (judgement([], ["reason"]).verdict, judgement([], ["reason"]).is_good) == ("INCOMPLETE", False)
    assert judgement([finding("lost", "1:0")], ["reason"]).verdict == "BAD"


def test_all_errors_are_counted_and_the_first_ones_are_kept() -> None:
    found = finding("lost", *(str(number) for number in range(EXAMPLES_MAX + 5)))
    assert found.count == EXAMPLES_MAX + 5
    assert found.examples == [str(number) for number in range(EXAMPLES_MAX)]
