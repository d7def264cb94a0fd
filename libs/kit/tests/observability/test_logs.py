"""Logs: events with fields, as one JSON object per line, without secrets, and cheap to import."""

import json
import logging
import subprocess
import sys

import pytest
from bindery_kit.observability import logs

SCRIPT = """
import logging
from bindery_kit.observability import logs
logs.configure(service="bookie", level="info", as_json=AS_JSON, bookie_id="b1")
log = logs.get_logger("test")
HERE
"""


def run(body: str, *, as_json: bool = True) -> str:
    script = SCRIPT.replace("AS_JSON", str(as_json)).replace("HERE", body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stderr


def test_an_event_is_one_json_line_with_its_fields() -> None:
    event = json.loads(run("log.warning('bookie_replaced', ledger_id=7, failed='b2')"))
    assert (event["event"], event["level"], event["ledger_id"], event["failed"]) == (
        "bookie_replaced",
        "warning",
        7,
        "b2",
    )
    assert (event["service"], event["bookie_id"], event["module"]) == ("bookie", "b1", "test")
    assert event["time"].endswith("Z")


def test_an_event_below_the_level_is_not_written() -> None:
    assert run("log.debug('detail')") == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_masked_at_every_depth(as_json: bool) -> None:
    said = run(
        "log.info('x', password='hunter2', headers={'Authorization': 'hunter2', 'n': [{'api_token': 'hunter2'}]})\n"
        "log.info('x', master_key=b'hunter2')",
        as_json=as_json,
    )
    assert "hunter2" not in said
    assert "********" in said


def test_bytes_are_logged_as_their_length_and_first_bytes() -> None:
    event = json.loads(run("log.info('x', body=b'\\0' * 5000)"))
    assert event["body"] == f"<5000 bytes {'00' * 16}>"


def test_records_of_the_standard_library_become_events() -> None:
    event = json.loads(run("logging.getLogger('other').warning('it is %s', 'late')"))
    assert (event["event"], event["message"], event["module"]) == ("library_message", "it is late", "other")


def test_an_event_keeps_its_name_and_fields_through_the_standard_library() -> None:
    said = run(
        "logging.getLogger('bindery_metadata.x').warning('vote_lost', extra={'vote': 7, 'zk_password': 'hunter2'})"
    )
    event = json.loads(said)
    assert (event["event"], event["vote"], event["module"]) == ("vote_lost", 7, "bindery_metadata.x")
    assert "hunter2" not in said


def test_an_exception_is_part_of_its_event() -> None:
    event = json.loads(run("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')"))
    assert "ZeroDivisionError" in event["exception"]


def test_a_terminal_gets_readable_lines() -> None:
    said = run("log.info('bookie_ready', port=3181)", as_json=False)
    assert said.split(maxsplit=1)[1].strip() == "INFO    bookie_ready  port=3181 bookie_id=b1"


def test_an_unknown_level_is_refused() -> None:
    from bindery_kit.observability import logs

    with pytest.raises(ValueError, match="not a log level"):
        logs.configure(service="x", level="loud")


@pytest.mark.parametrize(
    "module",
    [
        "observability.logs",
        "configuration.settings",
        "process.runtime",
        "observability.health",
        "observability.metrics",
    ],
)
def test_the_imports_before_a_bookie_serves_load_no_http_stack(module: str) -> None:
    heavy = ("fastapi", "starlette", "uvicorn", "httpx", "rich")
    script = f"import sys, bindery_kit.{module}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "[]"


class _Gone:
    """A stream that was closed, or whose reader was closed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_line_that_cannot_be_written_is_dropped(monkeypatch, capsys, error) -> None:
    logs.configure(service="x", level="info")
    logger = logs.get_logger("late")
    monkeypatch.setattr(sys, "stderr", _Gone(error))
    logger.error("lost")
    logging.getLogger("library").warning("lost too")
    monkeypatch.undo()
    logger.error("told")
    said = capsys.readouterr().err
    assert "told" in said
    assert "lost" not in said
