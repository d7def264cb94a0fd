"""Options and filters: what users may say, and what is left to read."""

import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
from bindery_client.connection.security import SecurityFiles
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX
from bindery_spark.audit.audit import Options
from bindery_spark.schemas import NO_LEDGER, TABLES
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.ledgers import LedgersReader
from bindery_spark.sources.options import TABLE_NAMES, LedgersOptions, MetadataOptions, parse_size
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

ZOOKEEPER = {"zookeeper": "h:1"}


def test_defaults_and_names_in_any_case() -> None:
    assert LedgersOptions.parse(ZOOKEEPER) == LedgersOptions(zookeeper="h:1")
    assert MetadataOptions.parse({**ZOOKEEPER, "Table": "Marks"}).table == "marks"
    options = LedgersOptions.parse({**ZOOKEEPER, "rate": "20MiB/s", "entries": "ends", "include_unexpected": "true"})
    assert (options.rate, options.entries, options.include_unexpected) == (20 * 2**20, "ends", True)


def test_every_table_has_a_schema() -> None:
    assert set(TABLE_NAMES) == set(TABLES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "zookeeper is missing"),
        ({"entries": "some"}, "one of all, listed, ends"),
        ({"rate": "fast"}, "rate must be a number of bytes"),
        ({"readers_per_bookie": "0"}, "at least 1"),
        ({"timeout_s": "-1"}, "must be seconds"),
        ({"timeout_s": "nan"}, "must be seconds"),
        ({"level": "deep"}, "there is no option level"),
        ({"include_unexpected": "maybe"}, "one of true, false"),
    ],
)
def test_wrong_options_are_told_with_what_would_be_right(given: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        LedgersOptions.parse({**ZOOKEEPER, **given} if given else {})


def test_files_of_the_readers_security_are_named_by_options_or_the_environment() -> None:
    environment = {"BINDERY_CLIENT_TOKEN_FILE": "/etc/token", "BINDERY_CLIENT_CHECK_HOSTNAME": "false"}
    told = {**ZOOKEEPER, "ca_file": "/etc/ca", "token_file": "/mine"}
    for parse in (LedgersOptions.parse, MetadataOptions.parse):
        assert parse(told, environment).security == SecurityFiles(
            ca_file="/etc/ca", token_file="/mine", check_hostname=False
        )
        assert parse(ZOOKEEPER).security == SecurityFiles()
    with pytest.raises(BadRequest, match="one of true, false"):
        LedgersOptions.parse({**ZOOKEEPER, "check_hostname": "maybe"})


def test_only_names_of_files_travel(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    files = SecurityFiles(token_file=str(tmp_path / "token"))
    assert b"s3cret" not in pickle.dumps(LedgersOptions(zookeeper="h:1", security=files))
    run = Options(security=files)
    assert Options.from_json(json.loads(json.dumps(asdict(run)))) == run
    assert files.load().token == b"s3cret"
    with pytest.raises(BadRequest, match="cannot use the files"):
        SecurityFiles(token_file=str(tmp_path / "none")).load()


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1024", 1024), ("1.5 KiB", 1536), ("20MiB/s", 20 * 2**20), ("1gib", 2**30)]
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size


def taken(*filters: Filter) -> tuple[Wanted, list[Filter]]:
    wanted = Wanted()
    return wanted, list(wanted.take(filters, columns=("bookie",)))


def test_ranges_of_ledgers_narrow_together() -> None:
    ledger = ("ledger_id",)
    wanted, left = taken(
        GreaterThan(ledger, 4), LessThanOrEqual(ledger, 90), GreaterThanOrEqual(ledger, 3), LessThan(ledger, 80),
        IsNotNull(ledger),
    )  # fmt: skip
    assert (wanted.first_ledger, wanted.last_ledger, left) == (5, 79, [])
    assert wanted.has(5)
    assert not wanted.has(4)


def test_rows_that_are_of_no_ledger_are_found_by_their_id_and_left_out_by_spark() -> None:
    """A bookie that cannot list has a row of NO_LEDGER, whichever ledgers its task was to look at."""
    ledger = ("ledger_id",)
    for wanted_by, first, last in [
        (GreaterThanOrEqual(ledger, 5), 5, ID_MAX),
        (EqualTo(ledger, NO_LEDGER), NO_LEDGER, NO_LEDGER),
        (LessThan(ledger, 0), NO_LEDGER, NO_LEDGER),
        (LessThanOrEqual(ledger, 5), NO_LEDGER, 5),
        (In(ledger, (NO_LEDGER, 3)), NO_LEDGER, 3),
    ]:
        reader = LedgersReader(LedgersOptions.parse({**ZOOKEEPER, "include_unexpected": "true"}))
        assert list(reader.pushFilters([wanted_by])) == [wanted_by]
        wanted = reader._wanted
        assert (wanted.first_ledger, wanted.last_ledger, wanted.is_empty) == (first, last, False)
    reader = LedgersReader(LedgersOptions.parse(ZOOKEEPER))
    assert list(reader.pushFilters([EqualTo(ledger, NO_LEDGER)])) == []
    assert reader._wanted.is_empty, "without those rows there is none"


def test_a_list_of_ledgers_narrows_to_its_range_and_is_left_to_spark() -> None:
    wanted, left = taken(In(("ledger_id",), (7, 3, 5)))
    assert (wanted.first_ledger, wanted.last_ledger, len(left)) == (3, 7, 1)


def test_bookies_narrow_and_contradictions_leave_nothing() -> None:
    wanted, left = taken(In(("bookie",), ("a", "b")), EqualTo(("bookie",), "b"))
    assert left == []
    assert [wanted.allows("bookie", name) for name in "abc"] == [False, True, False]
    assert taken(EqualTo(("bookie",), "a"), EqualTo(("bookie",), "b"))[0].is_empty
    assert taken(EqualTo(("ledger_id",), 1), GreaterThan(("ledger_id",), 1))[0].is_empty


def test_what_is_not_understood_is_left_to_spark() -> None:
    filters = [
        Not(EqualTo(("bookie",), "a")), EqualTo(("present",), True), LessThan(("bookie",), "b"),
        EqualTo(("segments", "first_entry"), 1), EqualTo(("ledger_id",), 1.5), Not(EqualTo(("ledger_id",), 1)),
    ]  # fmt: skip
    wanted, left = taken(*filters)
    assert left == filters
    assert (wanted.first_ledger, wanted.last_ledger, wanted.is_empty) == (0, ID_MAX, False)
