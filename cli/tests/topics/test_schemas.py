"""`bindery schemas` against a broker in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.common import output
from bindery.main import app
from bindery_core.errors import BadRequest
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]
PATH = "/v1/topics/public/default/orders/schema"
SHOWN = {"version": 3, "type": "AVRO", "definition": '"int"', "properties": {}, "created_at": 5}


class Registry:
    """Answers every request with the next of `answers`, and keeps the requests."""

    def __init__(self, *answers: Any, status: int = 200) -> None:
        self.answers = list(answers)
        self.status = status
        self.calls: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        content = request.read()
        self.calls.append(
            (request.method, request.url.path, json.loads(content) if content else dict(request.url.params))
        )
        return httpx.Response(self.status, json=self.answers.pop(0))


def run(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["schemas", *words], input=stdin)


def test_get_prints_the_definition(serve: Serve) -> None:
    serve(
        registry := Registry(SHOWN, SHOWN, SHOWN, {"versions": [2, 3]}, {**SHOWN, "type": "STRING", "definition": ""})
    )
    assert run("get", "orders").stdout == '"int"\n'
    assert json.loads(run("get", "orders", "--json").stdout) == SHOWN
    run("get", "orders", "--version", "3")
    assert run("get", "orders", "--versions").stdout == "2\n3\n"
    assert run("get", "orders").stdout == "STRING\n"
    assert [path for _, path, _ in registry.calls] == [PATH, PATH, f"{PATH}/versions/3", f"{PATH}/versions", PATH]
    assert isinstance(run("get", "orders", "--versions", "--version", "1").exception, BadRequest)
    serve(Registry({**SHOWN, "definition": '{\n  "type": "int"\n}\n'}))
    assert run("get", "orders").stdout == '{\n  "type": "int"\n}\n'


def test_upload_sends_a_file_or_standard_input(serve: Serve, tmp_path: Path) -> None:
    added = {"version": 0, "created": True}
    serve(registry := Registry(added, {**added, "created": False}, added, added))
    (tmp_path / "a.avsc").write_text('"long"')
    assert run("upload", "orders", "--type", "avro", "--file", str(tmp_path / "a.avsc")).stdout == "version 0\n"
    assert run("upload", "orders", "--type", "JSON", "--file", "-", stdin='"int"').stdout == "version 0 (existed)\n"
    assert json.loads(run("upload", "orders", "--type", "key-value", "--property", "a=b=c", "--json").stdout) == added
    assert [(method, path) for method, path, _ in registry.calls] == [("POST", PATH)] * 3
    assert [body for _, _, body in registry.calls] == [
        {"type": "AVRO", "properties": {}, "definition": '"long"'},
        {"type": "JSON", "properties": {}, "definition": '"int"'},
        {"type": "KEY_VALUE", "properties": {"a": "b=c"}},
    ]


@pytest.mark.parametrize("content", [b"\xff", b" " * (2**20 + 1), None], ids=["not UTF-8", "too large", "missing"])
def test_a_file_that_cannot_be_read_is_refused(serve: Serve, tmp_path: Path, content: bytes | None) -> None:
    serve(registry := Registry())
    file = tmp_path / "a.avsc"
    if content is not None:
        file.write_bytes(content)
    assert isinstance(run("upload", "orders", "--type", "AVRO", "--file", str(file)).exception, BadRequest)
    assert isinstance(run("upload", "orders", "--type", "AVRO", "--property", "a").exception, BadRequest)
    assert registry.calls == []


def test_compatibility_prints_the_reason_and_fails_if_there_is_one(serve: Serve) -> None:
    good = {"compatible": True, "version": None, "strategy": "FULL", "reason": None}
    bad = {**good, "compatible": False, "reason": "version 0: no"}
    serve(registry := Registry(good, {**good, "version": 2}, bad, bad))
    done = run("compatibility", "orders", "--type", "STRING")
    assert (done.exit_code, done.stdout) == (0, "compatible (FULL)\n")
    done = run("compatibility", "orders", "--type", "STRING")
    assert (done.exit_code, done.stdout) == (0, "compatible: it is version 2\n")
    done = run("compatibility", "orders", "--type", "STRING")
    assert (done.exit_code, done.stdout) == (1, "not compatible (FULL): version 0: no\n")
    done = run("compatibility", "orders", "--type", "STRING", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, bad)
    assert {path for _, path, _ in registry.calls} == {f"{PATH}/compatibility"}


def test_delete_asks_first(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(registry := Registry({"version": 4}, {"version": 5}, {"version": 6}))
    assert run("delete", "orders").exit_code == 2
    assert registry.calls == []
    assert run("delete", "orders", "--yes").stdout == "deleted\n"
    assert json.loads(run("delete", "orders", "--yes", "--force", "--json").stdout) == {"version": 5}
    monkeypatch.setattr(output, "is_interactive", lambda: True)
    assert run("delete", "orders", stdin="n\n").exit_code == 1
    assert run("delete", "orders", stdin="y\n").exit_code == 0
    assert registry.calls == [("DELETE", PATH, {}), ("DELETE", PATH, {"force": "true"}), ("DELETE", PATH, {})]
