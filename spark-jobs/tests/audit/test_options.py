"""Options of a run, and when another run covers them."""

from dataclasses import asdict, fields

import pytest
from bindery_core.ids import ID_MAX
from bindery_spark.audit.options import Options


def test_only_deep_audits_without_no_orphans_check_orphaned_data() -> None:
    asked = {
        Options(level=level, orphans=orphans) for level in ("quick", "standard", "deep") for orphans in (True, False)
    }
    assert {options for options in asked if options.reads_orphans} == {Options()}
    narrow, wide = Options(orphans=False), Options()
    assert narrow.is_covered_by(asdict(wide))
    assert not wide.is_covered_by(asdict(narrow)), "orphaned data was not checked"


def test_the_defaults_are_those_in_the_manual() -> None:
    defaults = {field.name: getattr(Options(), field.name) for field in fields(Options)}
    assert (defaults["level"], defaults["first"], defaults["last"]) == ("deep", 0, ID_MAX)
    assert (defaults["open_max_ms"], defaults["orphan_after_ms"]) == (604_800_000, 3_600_000)
    assert (defaults["orphans"], defaults["record"]) == (True, True)


@pytest.mark.parametrize(
    ("level", "entries", "ends_only", "is_deep"),
    [("quick", "ends", True, False), ("standard", "listed", False, False), ("deep", "all", False, True)],
)
def test_the_level_selects_the_entries_that_are_read(level: str, entries: str, ends_only: bool, is_deep: bool) -> None:
    options = Options(level=level)
    assert (options.entries, options.ends_only, options.is_deep) == (entries, ends_only, is_deep)


@pytest.mark.parametrize(
    ("narrowed", "covers"), [({}, True), ({"first": 1}, False), ({"last": 9}, False), ({"bookie": "a"}, False)]
)
def test_only_a_run_without_a_range_or_bookie_audits_all_ledgers(narrowed: dict, covers: bool) -> None:
    assert Options(**narrowed).covers_all_ledgers is covers


@pytest.mark.parametrize(
    ("mine", "other", "is_covered"),
    [
        pytest.param({}, {"level": "standard"}, False, id="less deep"),
        pytest.param({"level": "standard"}, {"level": "standard"}, True, id="as deep"),
        pytest.param({}, {"level": "of another version"}, False, id="an unknown level"),
        pytest.param({"first": 3, "last": 9}, {"first": 3, "last": 9}, True, id="the same range"),
        pytest.param({"first": 3, "last": 9}, {"first": 4, "last": 9}, False, id="it begins later"),
        pytest.param({"first": 3, "last": 9}, {"first": 3, "last": 8}, False, id="it ends earlier"),
        pytest.param({"first": 3, "last": 9}, {"first": 0, "last": 99, "bookie": "b"}, False, id="one bookie"),
        pytest.param({"bookie": "b"}, {"bookie": "c"}, False, id="another bookie"),
        pytest.param({"orphans": False}, {}, True, id="it also checked orphaned data"),
    ],
)
def test_a_run_covers_another_only_if_it_is_as_deep_and_as_wide(mine: dict, other: dict, is_covered: bool) -> None:
    assert Options(**mine).is_covered_by(asdict(Options(**other))) is is_covered


def test_stored_options_without_a_range_cover_nothing() -> None:
    """Options of an unknown version: a missing last ledger is before every ledger."""
    assert not Options(first=0, last=0).is_covered_by({"level": "deep", "first": 0})
    assert not Options(first=0, last=0).is_covered_by({"first": 0, "last": 0})
    assert Options(first=0, last=0).is_covered_by({"level": "deep", "last": 0}), "ranges begin at 0"
    assert not Options(first=-1, last=0).is_covered_by({"level": "deep", "last": 0})


def test_stored_options_that_predate_the_check_of_orphaned_data_had_it() -> None:
    assert Options().is_covered_by({"level": "deep", "first": 0, "last": ID_MAX})
