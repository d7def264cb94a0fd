"""Verdicts, summaries, the report, proposals and differences: from findings alone, without Spark."""

from dataclasses import asdict

from bindery_spark.audit.options import Options


def test_orphans_are_looked_for_by_deep_audits_that_are_not_told_otherwise() -> None:
    asked = {
        Options(level=level, orphans=orphans) for level in ("quick", "standard", "deep") for orphans in (True, False)
    }
    assert {options for options in asked if options.reads_orphans} == {Options()}
    narrow, wide = Options(orphans=False), Options()
    assert narrow.is_covered_by(asdict(wide))
    assert not wide.is_covered_by(asdict(narrow)), "what was not looked for may have been there"
