"""Settings of a bookie: consistent defaults, and the addresses that follow from them."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_bookie.settings import BookieSettings, ServerSettings
from bindery_bookie.storage.settings import StorageSettings
from bindery_core.errors import BadRequest
from bindery_kit.configuration.settings import Settings, descriptions, load


def test_every_setting_has_a_description() -> None:
    def check(cls: type[Settings]) -> None:
        texts = descriptions(cls)
        for name, field in cls.model_fields.items():
            if field.group is not None:
                check(field.group)
            else:
                assert texts.get(name), f"{cls.__name__}.{name} has no docstring"

    check(BookieSettings)


def test_defaults_do_not_contradict_each_other() -> None:
    settings = BookieSettings()
    assert settings.disk_usage_low < settings.disk_usage_max
    assert settings.server.frame_size_max <= settings.server.adds_size_max
    assert settings.server.unsent_size_max <= settings.server.reads_size_max


def test_directories_can_be_set_by_their_short_names() -> None:
    argv = ["--journal-dir", "/j", "--storage-ledger-directory", "/l", "--storage-flush-interval-s", "5"]
    (storage,) = load(BookieSettings, argv, prog="bindery-bookie").resolved_storages()
    assert (storage.journal_directory, storage.ledger_directory, storage.flush_interval_s) == ("/j", "/l", 5)


def test_several_directories_make_shards() -> None:
    def places(journal_dir: str, ledger_dir: str) -> list[tuple[str, str]]:
        settings = BookieSettings(journal_dir=journal_dir, ledger_dir=ledger_dir)
        return [(one.journal_directory, one.ledger_directory) for one in settings.resolved_storages()]

    assert places("/j", "/l") == [("/j", "/l")]
    assert places("/j", "/a,/b, /c") == [("/j/shard-0", "/a"), ("/j/shard-1", "/b"), ("/j/shard-2", "/c")]
    assert places("/j,/k", "/l") == [("/j", "/l/shard-0"), ("/k", "/l/shard-1")]
    assert places("/j,/k", "/a,/b") == [("/j", "/a"), ("/k", "/b")]
    assert places("/j,/k", "/a,/b,/c") == [("/j/shard-0", "/a"), ("/k", "/b"), ("/j/shard-2", "/c")]
    with pytest.raises(ValueError, match="named twice: /j, /j"):
        BookieSettings(journal_dir="/j,/j")


def test_a_low_mark_of_the_disk_above_the_high_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"disk_usage_low .0.9. must not be above disk_usage_max .0.8."):
        BookieSettings(disk_usage_max=0.8)
    assert BookieSettings(disk_usage_max=0.8, disk_usage_low=0.8).disk_usage_low == 0.8


def test_one_directory_under_two_names_is_refused(tmp_path: Path) -> None:
    """Two shards would treat each other's journals as files of a crashed first start, and delete them."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for name in ("disk/", "./disk", "disk/../disk", "link"):
        for setting in ("journal_dir", "ledger_dir"):
            with pytest.raises(ValueError, match="named twice"):
                BookieSettings(**{setting: f"{tmp_path}/disk,{tmp_path}/{name}"})


@pytest.mark.parametrize("gigabytes", [1, 32, 64, 1024])
def test_budgets_of_any_size_are_within_their_bounds(gigabytes: int) -> None:
    settings = BookieSettings(memory_size_max=gigabytes * 2**30)
    taken = 2 * settings.storage.write_cache_size_max + 2 * settings.server.adds_size_max
    assert 0.04 * gigabytes * 2**30 < taken < 0.5 * gigabytes * 2**30


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"minor_compaction_threshold": 1.01}, "at most 1"),
        ({"major_compaction_threshold": 1.01}, "at most 1"),
        ({"gc_wait_time_s": 3601}, "minor_compaction_interval_s .3600. is shorter than gc_wait_time_s .3601"),
        ({"gc_wait_time_s": 86401, "minor_compaction_threshold": 0}, "major_compaction_interval_s .86400. is shorter"),
        ({"minor_compaction_threshold": 0.8}, "minor_compaction_threshold .0.8. must be below major"),
        ({"major_compaction_threshold": 0.1}, "minor_compaction_threshold .0.2. must be below major"),
        ({"minor_compaction_interval_s": 86400}, "minor_compaction_interval_s .86400. must be below major"),
    ],
)
def test_compaction_settings_that_contradict_each_other_are_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StorageSettings(**changes)


def test_a_disabled_compaction_contradicts_no_other_setting() -> None:
    for off in (0, -1):
        for what in ("threshold", "interval_s"):
            minor_off = {f"minor_compaction_{what}": off, "gc_wait_time_s": 3601, "major_compaction_threshold": 0.1}
            major_off = {f"major_compaction_{what}": off, "minor_compaction_threshold": 0.9}
            for values in (minor_off, major_off):
                settings = StorageSettings(**values)
                assert {name: getattr(settings, name) for name in values} == values
                on = {name: value for name, value in values.items() if value != off}
                with pytest.raises(ValueError, match="compaction"):
                    StorageSettings(**on)  # the same values contradict each other while both compactions are on


def test_the_memory_is_divided_among_the_shards() -> None:
    one = BookieSettings().resolved_storages()[0]
    three = BookieSettings(ledger_dir="/a,/b,/c").resolved_storages()
    for name in ("write_cache_size_max", "read_cache_size_max", "reserve_size", "index_block_cache_size"):
        assert [getattr(shard, name) for shard in three] == [getattr(one, name) // 3] * 3
    many = BookieSettings(ledger_dir=",".join(f"/{n}" for n in range(200)))
    assert {shard.index_block_cache_size for shard in many.resolved_storages()} == {64 * 1024}


def test_settings_of_groups_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKIE_SERVER_CONNECTIONS_MAX", "7")
    monkeypatch.setenv("BOOKIE_PORT", "4000")
    settings = load(BookieSettings, ["--server-long-polls-max", "3"], prog="bindery-bookie")
    assert (settings.server.connections_max, settings.server.long_polls_max, settings.port) == (7, 3, 4000)
    assert ServerSettings().connections_max == 7


def test_the_id_is_the_advertised_address_unless_given() -> None:
    assert BookieSettings().resolved_bookie_id(port=3181) == "127.0.0.1:3181"
    assert BookieSettings(bookie_id="b0").resolved_bookie_id(port=3181) == "b0"
    assert BookieSettings(host="0.0.0.0", advertised_host="pod-0").resolved_bookie_id(port=1) == "pod-0:1"
    assert BookieSettings(host="0.0.0.0").resolved_host() == socket.gethostname()
    with pytest.raises(BadRequest):
        BookieSettings(bookie_id="a/b").resolved_bookie_id(port=1)


HEAVY = """
    fastapi starlette uvicorn httptools httpx typer rich pydantic annotated_types typing_extensions importlib.metadata
    prometheus_client google.protobuf.message google.protobuf.descriptor_pool google.protobuf.text_format
    bindery_client bindery_kit.http.http_server bindery_bookie.admin.app bindery_recovery
    bindery_metadata.ledgers.ledger_manager bindery_core.wire.v3_generated
"""


def test_the_http_stack_is_not_imported_before_the_ledger_port_serves() -> None:
    """Other slow imports are not imported either."""
    code = (
        "import sys, bindery_bookie.__main__;"
        f"print([name for name in {HEAVY.split()} if name in sys.modules]);"
        # every name can be imported
        f"print([name for name in {HEAVY.split()} if not find(name)])"
    )
    code = "from importlib.util import find_spec as find;" + code
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split("\n")[:2] == ["[]", "[]"]


def test_cookie_and_service_info_are_encoded_without_protobuf() -> None:
    code = (
        "import sys; from bindery_core.formats import bookie_service_info as info, cookie;"
        "text = cookie.Cookie(bookie_id='b:1', journal_dirs=('/j',), ledger_dirs=('/l',), instance_id='i').text();"
        "cookie.parse(text); info.encode(info.of_bookie(host='h', port=1, http_port=2));"
        "print([name for name in sys.modules if name.startswith('google')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
