"""HttpSettings: limits of HTTP ports from the environment."""

import pytest
from bindery_kit.configuration.http_settings import AdminHttpSettings, HttpSettings
from bindery_kit.configuration.settings import WrongSettings


def test_ports_of_operators_have_smaller_defaults() -> None:
    port, admin = HttpSettings(), AdminHttpSettings()
    assert (port.connections_max, admin.connections_max) == (5000, 250)
    assert (port.heads_size_max, admin.heads_size_max) == (8 * 2**20, 2 * 2**20)
    assert (port.bodies_size_max, admin.bodies_size_max) == (64 * 2**20, 2 * 2**20)
    assert (port.unread_size_max, admin.unread_size_max) == (96 * 2**20, 8 * 2**20)
    assert (port.hosts, port.origins, port.connections_per_address_max) == ("", "", 0)
    assert (port.head_timeout_s, port.transfer_grace_s, port.transfer_rate_min) == (30.0, 30.0, 16384.0)
    assert admin.transfer_rate_min == port.transfer_rate_min


def test_the_environment_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINDERY_HTTP_HOSTS", "a.example.com")
    assert HttpSettings().hosts == "a.example.com"


@pytest.mark.parametrize(
    "wrong",
    [
        {"connections_max": 0}, {"connections_per_address_max": -1}, {"heads_size_max": 1}, {"bodies_size_max": 1},
        {"unread_size_max": 1}, {"head_timeout_s": 0}, {"transfer_grace_s": 0}, {"transfer_rate_min": 0},
    ],
)  # fmt: skip
def test_limits_cannot_be_switched_off(wrong: dict[str, float]) -> None:
    with pytest.raises(WrongSettings):
        HttpSettings(**wrong)
