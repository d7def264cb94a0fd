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


FORGED = {
    "line feed": "x\n2026-11-25 ERROR   forged",
    "carriage return": "x\rforged",
    "next line": "x\x85forged",
    "line separator": "x\u2028forged",
    "paragraph separator": "x\u2029forged",
    "escape sequence": "x\x1b[31mforged",
    "C1 escape sequence": "x\x9b31mforged",
    "delete": "x\x7fforged",
    "right to left override": "x\u202eforged",
    "right to left isolate": "x\u2067forged",
    "zero width": "x\u200b\ufeffforged",
    "tag character": "x\U000e0041forged",
    "half of a surrogate pair": "x\ud800forged",
}


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize(
    "statement",
    [
        "log.warning('x', peer=TEXT)",
        "log.warning('x', peers=[{'name': TEXT}])",
        "log.warning('x', peers={TEXT: 1})",
        "logging.getLogger('library').warning('peer %s', TEXT)",
        "logging.getLogger('library').warning('peer', extra={'name_': TEXT})",
    ],
)
def test_a_value_cannot_forge_a_line(capsys, text: str, statement: str) -> None:
    for as_json in (True, False):
        logs.configure(service="bookie", as_json=as_json)
        exec(statement.replace("TEXT", repr(text)), {"log": logs.get_logger(), "logging": logging})
        said = capsys.readouterr().err
        assert said.endswith("\n")
        assert said[:-1].isprintable()
        assert "forged" in said
        if as_json:
            assert text in str(json.loads(said)) or repr(text)[1:-1] in str(json.loads(said)), "nothing is lost"


def test_a_readable_line_quotes_a_value_that_looks_like_fields(capsys) -> None:
    logs.configure(service="bookie", as_json=False)
    log = logs.get_logger()
    log.warning("x", peer="a error=b", name='say "hi"', path="a\\nb", reason="cannot connect: refused")
    assert capsys.readouterr().err.split(maxsplit=2)[2] == (
        r"""x  peer="a error=b" name="say \"hi\"" path="a\\nb" reason=cannot connect: refused""" + "\n"
    )


def test_the_lines_of_an_exception_do_not_look_like_events(capsys) -> None:
    for as_json in (True, False):
        logs.configure(service="bookie", as_json=as_json)
        try:
            raise ValueError("x\n12:00:00.000 ERROR   forged\x1b[31m\u2028end")
        except ValueError:
            logs.get_logger().exception("failed")
        lines = capsys.readouterr().err.split("\n")[:-1]
        assert all(line.isprintable() for line in lines)
        if as_json:
            assert json.loads(lines[0])["exception"].endswith("forged\x1b[31m\u2028end")
        else:
            assert all(line.startswith("  | ") for line in lines[1:])
            assert lines[-1] == r"  | 12:00:00.000 ERROR   forged\u001b[31m\u2028end"


def test_long_values_are_cut(capsys) -> None:
    logs.configure(service="bookie", as_json=True)
    log = logs.get_logger()
    log.warning("x", text="a" * 10**6 + "end", items=list(range(10**5)), more={str(n): n for n in range(10**4)})
    log.warning("x", deep=[[[[["b" * 10**6]]]]])
    try:
        raise ValueError("c" * 10**6 + "end")
    except ValueError:
        log.exception("failed")
    long, deep, trace = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert len(long["text"]) < 4200
    assert long["text"].endswith("end")
    assert "(995907 characters left out)" in long["text"]
    assert long["items"] == [*range(100), "... (99900 left out)"]
    assert (len(long["more"]), long["more"]["left_out"]) == (101, 9900)
    assert len(str(deep)) < 4500
    assert len(trace["exception"]) < 33_000
    assert trace["exception"].endswith("end")


def test_a_number_that_json_does_not_have_is_a_text(capsys) -> None:
    logs.configure(service="bookie", as_json=True)
    logs.get_logger().warning("x", a=float("nan"), b=[float("-inf")], c=1.5)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    event = json.loads(capsys.readouterr().err, parse_constant=refuse)
    assert (event["a"], event["b"], event["c"]) == ("nan", ["-inf"], 1.5)


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
