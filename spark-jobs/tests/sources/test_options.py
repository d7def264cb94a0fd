"""Options of the data sources."""

import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
from bindery_client.connection.security import SecurityFiles
from bindery_core.errors import BadRequest
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles, NewNodes
from bindery_spark.audit.options import Options
from bindery_spark.schemas import TABLES
from bindery_spark.sources.options import TABLE_NAMES, LedgersOptions, MetadataOptions, named_files, parse_size
from bindery_spark.sources.topic.options import TopicOptions

ZOOKEEPER = {"zookeeper": "h:1"}


def test_options_have_defaults_and_names_in_any_case() -> None:
    assert LedgersOptions.parse(ZOOKEEPER) == LedgersOptions(zookeeper="h:1")
    assert MetadataOptions.parse({**ZOOKEEPER, "Table": "Marks"}).table == "marks"
    options = LedgersOptions.parse({**ZOOKEEPER, "rate": "20MiB/s", "entries": "ends", "include_unexpected": "true"})
    assert (options.rate, options.entries, options.include_unexpected) == (20 * 2**20, "ends", True)


def test_the_defaults_are_those_in_the_table_of_options() -> None:
    for ledgers in (LedgersOptions.parse(ZOOKEEPER), LedgersOptions(zookeeper="h:1")):
        assert (ledgers.ledgers_root, ledgers.entries, ledgers.rate, ledgers.timeout_s) == ("/ledgers", "all", 0, 10)
        assert (ledgers.readers_per_bookie, ledgers.include_unexpected) == (2, False)
        assert (ledgers.partition_bytes, ledgers.partition_entries) == (67_108_864, 250_000)
    for metadata in (MetadataOptions.parse(ZOOKEEPER), MetadataOptions(zookeeper="h:1")):
        assert (metadata.table, metadata.ledgers_per_part, metadata.ledgers_root) == ("ledgers", 5_000, "/ledgers")


def test_given_options_replace_the_defaults() -> None:
    given = {"ledgers_root": "/mine", "readers_per_bookie": "1", "partition_bytes": "7", "partition_entries": "1"}
    ledgers = LedgersOptions.parse({**ZOOKEEPER, **given, "timeout_s": "0.5", "include_unexpected": "False"})
    assert (ledgers.ledgers_root, ledgers.readers_per_bookie, ledgers.timeout_s) == ("/mine", 1, 0.5)
    assert (ledgers.partition_bytes, ledgers.partition_entries, ledgers.include_unexpected) == (7, 1, False)
    assert LedgersOptions.parse({**ZOOKEEPER, "partition_bytes": "0"}).partition_bytes == 1, "one entry per task"
    assert LedgersOptions.parse({**ZOOKEEPER, "timeout_s": "86399.5"}).timeout_s == 86_399.5
    metadata = MetadataOptions.parse({**ZOOKEEPER, "ledgers_per_part": "3", "ledgers_root": "/mine"})
    assert (metadata.ledgers_per_part, metadata.ledgers_root) == (3, "/mine")


def test_a_path_as_in_load_is_ignored() -> None:
    assert LedgersOptions.parse({**ZOOKEEPER, "path": "x"}) == LedgersOptions(zookeeper="h:1")


def test_every_table_has_a_schema() -> None:
    assert set(TABLE_NAMES) == set(TABLES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "zookeeper is missing"),
        ({"entries": "some"}, "one of all, listed, ends"),
        ({"rate": "fast"}, "rate must be a number of bytes"),
        ({"readers_per_bookie": "0"}, "at least 1"),
        ({"readers_per_bookie": "two"}, "at least 1"),
        ({"timeout_s": "-1"}, "must be seconds"),
        ({"timeout_s": "0"}, "must be seconds"),
        ({"timeout_s": "soon"}, "must be seconds"),
        ({"timeout_s": "86400"}, "must be seconds"),
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


def test_files_for_zookeeper_are_named_by_options_or_the_environment() -> None:
    environment = {"BINDERY_ZOOKEEPER_CA_FILE": "/etc/ca", "BINDERY_ZOOKEEPER_CREDENTIALS_FILE": "/etc/zookeeper"}
    given = {**ZOOKEEPER, "zookeeper_credentials_file": "/mine", "zookeeper_new_nodes": "creator"}
    wanted = AccessFiles(ca_file="/etc/ca", credentials_file="/mine", new_nodes=NewNodes.CREATOR)
    for parse in (LedgersOptions.parse, MetadataOptions.parse):
        assert parse(given, environment).access == wanted
        assert parse(ZOOKEEPER).access == NO_ACCESS
    assert TopicOptions.parse({**given, "topic": "t"}, environment).access == wanted
    pairs = {"zookeeper_certificate_file": "/c", "zookeeper_key_file": "/k", "zookeeper_ca_file": ""}
    assert LedgersOptions.parse({**ZOOKEEPER, **pairs}, environment).access == AccessFiles(
        ca_file="/etc/ca", certificate_file="/c", key_file="/k", credentials_file="/etc/zookeeper"
    )


def test_the_files_of_an_environment_become_options() -> None:
    environment = {"BINDERY_CLIENT_TOKEN_FILE": "/t", "BINDERY_ZOOKEEPER_CA_FILE": "/z", "BINDERY_CLIENT_CA_FILE": ""}
    found = named_files({"token_file": "", "check_hostname": "false"}, environment)
    assert found == {"token_file": "/t", "check_hostname": "false", "zookeeper_ca_file": "/z"}
    assert named_files({"token_file": "/mine"}, environment)["token_file"] == "/mine"


@pytest.mark.parametrize("name", ["token", "password", "Token"])
def test_a_secret_as_an_option_is_refused_without_its_value(name: str) -> None:
    with pytest.raises(BadRequest, match="Spark prints options: name a file, in token_file") as error:
        LedgersOptions.parse({**ZOOKEEPER, name: "s3cret"})
    assert "s3cret" not in str(error.value)


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
    ("text", "size"),
    [("0", 0), ("1024", 1024), ("1.5 KiB", 1536), ("20MiB/s", 20_971_520), ("1gib", 1_073_741_824), ("7 B", 7)],
)
def test_sizes_and_rates_are_converted_to_bytes(text: str, size: float) -> None:
    assert parse_size(text) == size
