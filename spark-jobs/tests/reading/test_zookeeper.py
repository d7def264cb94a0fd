"""Which files a job presents to ZooKeeper, and what errors name."""

from types import SimpleNamespace
from typing import Any

import pytest
from bindery_core.errors import BadRequest
from bindery_metadata.stores.zookeeper_access import AccessFiles, NewNodes
from bindery_spark.reading import zookeeper as module


async def test_without_given_files_those_of_the_environment_are_presented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINDERY_ZOOKEEPER_CREDENTIALS_FILE", "/of/the/environment")

    async def connect(servers: str, *, access: Any) -> Any:
        return servers, access

    def load(files: AccessFiles, name_of: Any) -> AccessFiles:
        assert name_of is module.name_of
        return files

    monkeypatch.setattr(module, "ZooKeeperStore", SimpleNamespace(connect=connect))
    monkeypatch.setattr(AccessFiles, "load", load)
    assert await module.connect("h:1") == ("h:1", AccessFiles(credentials_file="/of/the/environment"))
    given = AccessFiles(credentials_file="/given")
    assert await module.connect("h:1", given) == ("h:1", given)


async def test_errors_name_the_option_and_its_variable() -> None:
    with pytest.raises(BadRequest, match=r"BINDERY_ZOOKEEPER_CREDENTIALS_FILE \(option zookeeper_credentials_file\)"):
        await module.connect("h:1", AccessFiles(new_nodes=NewNodes.CREATOR))
