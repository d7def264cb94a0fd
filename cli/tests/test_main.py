"""The `bindery` command: start, help, errors and exit codes, names of topics and URLs."""

import errno
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from bindery import main as main_module
from bindery.main import app
from bindery.topics.broker_api import (
    Broker,
    BrokerRefused,
    BrokerUnreachable,
    broker_url,
    subscription_path,
    topic_path,
)
from bindery_core.errors import BadRequest, Corrupt, MetadataUnreachable
from typer.testing import CliRunner

VERBS = [
    ["standalone"],
    ["standalone", "status"],
    ["standalone", "stop"],
    ["standalone", "start"],
    ["cluster", "init"],
    ["produce"],
    ["consume"],
    ["topics", "list"],
    ["topics", "stats"],
    ["topics", "retention"],
    ["topics", "subscriptions"],
    ["topics", "cancel"],
    ["topics", "delete"],
    *(
        ["subscriptions", verb]
        for verb in ("list", "show", "create", "delete", "seek", "skip", "expire", "clear", "explain")
    ),
    ["ledger", "list"],
    ["ledger", "show"],
    ["ledger", "read"],
    ["ledger", "compare"],
    ["wire", "decode"],
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_command_has_help(verb: list[str]) -> None:
    result = CliRunner().invoke(app, [*verb, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize("verb", [v for v in VERBS if v[-1] not in ("standalone", "stop", "start")], ids=" ".join)
def test_every_command_with_output_offers_json(verb: list[str]) -> None:
    assert "--json" in CliRunner().invoke(app, [*verb, "--help"]).output


def test_an_unreachable_zookeeper_is_reported_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise MetadataUnreachable("no zookeeper server responds", hosts="zk:2181")

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "bindery: no zookeeper server responds: hosts=zk:2181; start ZooKeeper, or name its servers with --zookeeper "
        "or BINDERY_ZOOKEEPER\n"
    )


def test_starting_the_command_loads_nothing_heavy() -> None:
    heavy = ("asyncio", "httpx", "kazoo", "pydantic", "rich", "uvloop", "google.protobuf", "bindery_client")
    script = f"import sys, bindery.main; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("not a topic"), 2),
        (BrokerUnreachable("no broker"), 1),
        (Corrupt("damaged entry"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_distinguish_usage_failure_and_interruption(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == code
    if code != 130:
        assert capsys.readouterr().err == f"bindery: {error}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (["topics", "stats", "a/b", "--json"], "bad_request", 2),
        (["consume", "x", "--json", "--url", "http://127.0.0.1:9"], "broker_unreachable", 1),
        (["ledger", "show", "--json"], "usage", 2),
        (["topics", "list", "--json", "--no-such-option"], "usage", 2),
    ],
    ids=["BadRequest", "BrokerUnreachable", "missing argument", "unknown option"],
)
def test_an_error_is_one_line_of_json_with_json(
    arguments: list[str],
    code: str,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bindery", *arguments])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    error = json.loads(captured.err)["error"]
    assert (error["code"], error["exit_code"]) == (code, exit_code)
    assert error["message"]


def test_json_does_not_change_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["bindery", "standalone", "status", "--json", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["state"] == "down"


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("hello", "/v1/topics/public/default/hello"),
        ("t/n/x", "/v1/topics/t/n/x"),
        ("persistent://t/n/x y", "/v1/topics/t/n/x%20y"),
        ("t/n/50%?", "/v1/topics/t/n/50%25%3F"),
    ],
)
def test_a_topic_may_have_a_short_or_a_full_name(typed: str, path: str) -> None:
    assert topic_path(typed) == path


@pytest.mark.parametrize("typed", ["", "a/b", "a//b", "a/b/c/d"])
def test_an_invalid_topic_is_refused(typed: str) -> None:
    with pytest.raises(BadRequest, match="TENANT/NAMESPACE/NAME"):
        topic_path(typed)


def test_a_subscription_may_have_any_name() -> None:
    assert subscription_path("a/b c") == "/subscriptions/a%2Fb%20c"


def test_the_address_of_the_broker_comes_from_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broker_url(None) == "http://127.0.0.1:8080"
    monkeypatch.setenv("BINDERY_URL", "http://other:1/")
    assert broker_url(None) == "http://other:1"
    assert broker_url("http://given:2") == "http://given:2"


@pytest.mark.parametrize("verb", [["consume", "x"], ["bookie", "state"]], ids=" ".join)
@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "http:///x", "http://h:port", "ftp://h:1", "http://h:1/ x"])
def test_an_invalid_url_is_wrong_usage(verb: list[str], url: str) -> None:
    result = CliRunner().invoke(app, [*verb, "--url", url])
    assert isinstance(result.exception, BadRequest)
    assert str(result.exception) == f"not a URL: {url}; the format is http://host:port"


def test_a_refusal_contains_the_message_of_the_broker() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (
                b'{"code": "no_such_topic", "detail": "no such topic: topic=x"}' if self.path == "/json" else b"<html>"
            )
            self.send_response(404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with Broker(f"http://127.0.0.1:{server.server_port}") as broker:
            with pytest.raises(BrokerRefused, match=r"no such topic: topic=x \(404, no_such_topic\)"):
                broker.get("/json")
            with pytest.raises(BrokerRefused, match=r"<html> \(404\)"):
                broker.get("/other")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


RUN = "import sys; sys.argv[0] = 'bindery'; from bindery.main import main; main()"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--help"], "bindery: cannot write to stdout: No space left on device\n"),
        (["standalone", "status", "--data", "."], "bindery: cannot write to stdout: No space left on device\n"),
        (
            ["standalone", "status", "--data", ".", "--json"],
            '{"error": {"code": "output_failed", "message": "cannot write to stdout: No space left on device", '
            '"exit_code": 1}}\n',
        ),
    ],
    ids=["help", "text", "json"],
)
def test_a_full_disk_is_one_line_on_stderr(arguments: list[str], error: str, unbuffered: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (1, error)


@pytest.mark.parametrize(
    ("closed", "out", "error", "code"),
    [
        (">&-", "", "bindery: stdout is closed; to discard the output, redirect it to /dev/null\n", 1),
        ("2>&-", "bindery ", "", 0),
        ("| true", "", "", 0),
    ],
)
def test_closed_streams(closed: str, out: str, error: str, code: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" --version {closed}', sys.executable, RUN],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, error)
    assert done.stdout[: len("bindery ")] == out


def test_errors_that_are_not_those_of_stdout_are_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        print("x")
        raise OSError(errno.EIO, "a device")

    monkeypatch.setattr(main_module, "app", fail)
    monkeypatch.setattr(sys, "argv", ["bindery"])
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(OSError, match="a device"):
            main_module.main()
    assert (tmp_path / "out").read_text() == "x\n"
