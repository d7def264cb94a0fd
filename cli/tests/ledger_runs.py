"""Run `bindery ledger` commands on a ledger in memory."""

import json
from typing import Any

from bindery.common import operator
from bindery.main import app
from bindery_core.ids import BookieId
from fake_replicas import FakeReplicas, connecting_to
from typer.testing import CliRunner, Result


def run(source: FakeReplicas, *arguments: str) -> Result:
    before = operator.connected
    operator.connected = connecting_to(source)  # type: ignore[assignment]
    try:
        result = CliRunner().invoke(app, ["ledger", arguments[0], "7", *arguments[1:]])
    finally:
        operator.connected = before
    assert source.recoveries == 0, "reads must not fence"
    return result


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def damaged() -> FakeReplicas:
    """Entry 1 corrupt at b0, entry 2 missing at b1, entry 3 diverged at b2."""
    source = FakeReplicas([b"zero", b"one", b"two", b"three", b"four"])
    source.corrupt("b0", 1)
    del source.frames[BookieId("b1")][2]
    source.put("b2", 3, b"THREE")
    return source
