"""Verdicts, summaries, the report, proposals and differences: from findings alone, without Spark."""

from dataclasses import asdict

from bindery_spark.audit.audit import Options


def test_orphans_are_looked_for_by_deep_audits_that_are_not_told_otherwise() -> None:
    asked = {
        Options(level=level, orphans=orphans) for level in ("quick", "standard", "deep") for orphans in (True, False)
    }
    assert {options for options in asked if options.looks_beside} == {Options()}
    narrow, wide = Options(orphans=False), Options()
    assert narrow.sees_no_more_than(asdict(wide))
    assert not wide.sees_no_more_than(asdict(narrow)), "what was not looked for may have been there"
