"""ZooKeeperAccessSettings: what they load, and the names in their errors."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_kit.configuration.settings import SettingsConfigDict, WrongSettings
from bindery_kit.configuration.zookeeper_access import ZooKeeperAccessSettings
from bindery_metadata.stores.access_lists import Credential, NewNodes


class OfService(ZooKeeperAccessSettings):
    model_config = SettingsConfigDict(env_prefix="SERVICE_ZOOKEEPER_ACCESS_")


def test_nothing_is_presented_by_default() -> None:
    access = OfService().load()
    assert access.new_nodes is NewNodes.OPEN
    assert access.presented.tls is None
    assert access.presented.credentials == ()


def test_the_environment_sets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("bindery:a:password")
    monkeypatch.setenv("SERVICE_ZOOKEEPER_ACCESS_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("SERVICE_ZOOKEEPER_ACCESS_NEW_NODES", "shared")
    settings = OfService()
    assert settings.load().presented.credentials == (Credential("bindery", "a:password"),)
    assert settings.load().new_nodes is NewNodes.SHARED
    assert "a:password" not in repr(settings) + repr(settings.load()) + "".join(map(str, settings.effective()))


def test_wrong_values_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(WrongSettings, match="new_nodes"):
        OfService(new_nodes="closed")
    with pytest.raises(BadRequest, match=r"zookeeper_access\.new_nodes=creator requires zookeeper_access\.cred"):
        OfService(new_nodes="creator").load()
    with pytest.raises(BadRequest, match=r"zookeeper_access\.ca_file"):
        OfService(ca_file=str(tmp_path / "none")).load()
