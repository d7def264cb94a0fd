"""Options of the data sources."""

import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
from bindery_client.connection.security import SecurityFiles
from bindery_core.errors import BadRequest
from bindery_spark.audit.options import Options
from bindery_spark.schemas import TABLES
from bindery_spark.sources.options import TABLE_NAMES, LedgersOptions, MetadataOptions, parse_size

ZOOKEEPER = {"zookeeper": "h:1"}


def test_options_have_defaults_and_names_in_any_case() -> None:
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
        ({"level": "deep"}, "unknown option level"),
        ({"include_unexpected": "maybe"}, "one of true, false"),
    ],
)
def test_errors_of_options_name_the_valid_values(given: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        LedgersOptions.parse({**ZOOKEEPER, **given} if given else {})


def test_credential_files_are_named_by_options_or_the_environment() -> None:
    environment = {"BINDERY_CLIENT_TOKEN_FILE": "/etc/token", "BINDERY_CLIENT_CHECK_HOSTNAME": "false"}
    told = {**ZOOKEEPER, "ca_file": "/etc/ca", "token_file": "/mine"}
    for parse in (LedgersOptions.parse, MetadataOptions.parse):
        assert parse(told, environment).security == SecurityFiles(
            ca_file="/etc/ca", token_file="/mine", check_hostname=False
        )
        assert parse(ZOOKEEPER).security == SecurityFiles()
    with pytest.raises(BadRequest, match="one of true, false"):
        LedgersOptions.parse({**ZOOKEEPER, "check_hostname": "maybe"})


def test_tasks_contain_only_the_names_of_credential_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    files = SecurityFiles(token_file=str(tmp_path / "token"))
    assert b"s3cret" not in pickle.dumps(LedgersOptions(zookeeper="h:1", security=files))
    run = Options(security=files)
    assert Options.from_json(json.loads(json.dumps(asdict(run)))) == run
    assert files.load().token == b"s3cret"
    with pytest.raises(BadRequest, match="cannot load the client's TLS or token files"):
        SecurityFiles(token_file=str(tmp_path / "none")).load()


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1024", 1024), ("1.5 KiB", 1536), ("20MiB/s", 20 * 2**20), ("1gib", 2**30)]
)
def test_sizes_and_rates_are_converted_to_bytes(text: str, size: float) -> None:
    assert parse_size(text) == size
