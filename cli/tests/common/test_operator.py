"""The connection to ZooKeeper reports what it waits for."""

import asyncio
from typing import Any

import pytest
from bindery.common import operator
from bindery_core.errors import BadRequest, MetadataUnreachable


@pytest.mark.parametrize(
    ("after_s", "expected"), [(0.01, "waiting for ZooKeeper at zk:1 (timeout: 15 s)\n"), (9.0, "")]
)
def test_a_slow_connection_is_reported_after_a_while(
    after_s: float, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent:
        @staticmethod
        async def connect(hosts: str, **_: Any) -> Any:
            await asyncio.sleep(0.1)
            raise MetadataUnreachable("no zookeeper answers", hosts=hosts)

    async def connect() -> None:
        async with operator.connected_store("zk:1"):
            pass

    monkeypatch.setattr("bindery_metadata.stores.zookeeper.ZooKeeperStore", Silent)
    monkeypatch.setattr(operator, "WAITING_AFTER_S", after_s)
    with pytest.raises(MetadataUnreachable):
        asyncio.run(connect())
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-12-01T08:00:00Z", 1_796_112_000_000),
        ("2026-12-01T09:00:00+01:00", 1_796_112_000_000),
        ("2026-12-01 08:00:00.0019Z", 1_796_112_000_001),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
    ],
)
def test_a_time_is_parsed_to_milliseconds(text: str, ms: int) -> None:
    assert operator.parse_time(text) == ms


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "2026-12-01T08:00:00", "2026-12-01", "08:00Z", "1969-12-31T23:59:59Z"]
)
def test_a_time_without_its_zone_or_before_1970_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="the format is 2026-12-01T08:00:00Z"):
        operator.parse_time(text)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("@0", 0),
        ("@1796112000000", 1_796_112_000_000),
        ("5m", 700_000),
        ("1h", 0),
        ("90s", 910_000),
        ("1970-01-01T00:00:01Z", 1_000),
    ],
)
def test_a_moment_is_a_time_an_age_or_milliseconds(text: str, ms: int) -> None:
    assert operator.parse_moment(text, now_ms=1_000_000) == ms


@pytest.mark.parametrize("text", ["", "5", "@", "@-1", "@1.5", "@1234567890123456", "5 m", "today", "2026-12-01"])
def test_other_texts_are_no_moment(text: str) -> None:
    with pytest.raises(BadRequest, match="the formats are 5m"):
        operator.parse_moment(text, now_ms=0)
