"""Settings: defaults that hold together, and the addresses that follow from them."""

import socket
import subprocess
import sys

import pytest
from bindery_bookie.server import bind
from bindery_bookie.settings import BookieSettings, ServerSettings
from bindery_core.errors import BadRequest
from bindery_kit.settings import Settings, load


def test_every_setting_explains_itself() -> None:
    def check(cls: type[Settings]) -> None:
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                check(field.annotation)
            else:
                assert field.description, f"{cls.__name__}.{name} has no docstring"

    check(BookieSettings)


def test_defaults_hold_together() -> None:
    settings = BookieSettings()
    assert settings.disk_usage_low < settings.disk_usage_max
    assert settings.server.frame_size_max <= settings.server.adds_size_max
    assert settings.server.unsent_size_max <= settings.server.reads_size_max


def test_directories_by_their_short_names() -> None:
    argv = ["--journal-dir", "/j", "--storage-ledger-directory", "/l", "--storage-flush-interval-s", "5"]
    storage = load(BookieSettings, argv, prog="bindery-bookie").resolved_storage()
    assert (storage.journal_directory, storage.ledger_directory, storage.flush_interval_s) == ("/j", "/l", 5)


def test_the_environment_reaches_groups(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_only_loopback_is_bound_without_saying_so() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(BadRequest, match="--insecure"):
            bind(host, 0, insecure=False)
    bind("127.0.0.1", 0, insecure=False).close()
    bind("0.0.0.0", 0, insecure=True).close()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"cannot listen: Address already in use: host=127.0.0.1 port={port}"):
            bind("127.0.0.1", port, insecure=False)


def test_the_http_stack_is_not_imported_before_the_ledger_port_serves() -> None:
    code = (
        "import sys, bindery_bookie.main; heavy = 'fastapi starlette uvicorn httpx bindery_kit.http_server';"
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
