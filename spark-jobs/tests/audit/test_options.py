"""Options of a run, and when another run covers them."""

from dataclasses import asdict

from bindery_spark.audit.options import Options


def test_only_deep_audits_without_no_orphans_check_orphaned_data() -> None:
    asked = {
        Options(level=level, orphans=orphans) for level in ("quick", "standard", "deep") for orphans in (True, False)
    }
    assert {options for options in asked if options.reads_orphans} == {Options()}
    narrow, wide = Options(orphans=False), Options()
    assert narrow.is_covered_by(asdict(wide))
    assert not wide.is_covered_by(asdict(narrow)), "orphaned data was not checked"
