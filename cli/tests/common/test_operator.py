"""The connection to ZooKeeper reports what it waits for."""

import asyncio
from typing import Any

import pytest
from bindery.common import operator
from bindery_core.errors import MetadataUnreachable


@pytest.mark.parametrize(
    ("after_s", "expected"), [(0.01, "waiting for ZooKeeper at zk:1 (timeout: 15 s)\n"), (9.0, "")]
)
def test_a_slow_connection_is_reported_after_a_while(
    after_s: float, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent:
        @staticmethod
        async def connect(hosts: str) -> Any:
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
