"""RecoverySettings: the defaults, their bounds, and the variables that set them."""

from typing import Any

import pytest
from bindery_kit.configuration.settings import WrongSettings
from bindery_recovery.settings import RecoverySettings


def test_the_defaults() -> None:
    assert dict(RecoverySettings()) == {
        "lost_bookie_delay_s": 120,
        "bookie_check_interval_s": 86_400,
        "ledger_check_interval_s": 604_800,
        "ledger_check_rate": 20.0,
        "ledger_check_percent": 0.0,
        "placement_check_interval_s": 0.0,
        "placement_repair": True,
        "placement_repair_delay_s": 300.0,
        "replica_check_interval_s": 0.0,
        "drain_interval_s": 30.0,
        "workers": 1,
        "open_ledger_grace_s": 30.0,
        "bytes_per_s_max": 67_108_864,
        "bytes_per_s_min": 1_048_576,
        "foreground_p99_target_ms": 50.0,
        "entries_in_flight_max": 100,
        "check_depth_percent": 0.0,
    }


def test_a_variable_sets_the_field_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOVERY_LOST_BOOKIE_DELAY_S", "7")
    monkeypatch.setenv("RECOVERY_LEDGER_CHECK_RATE", "2.5")
    settings = RecoverySettings()
    assert (settings.lost_bookie_delay_s, settings.ledger_check_rate) == (7, 2.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"lost_bookie_delay_s": -1},
        {"lost_bookie_delay_s": 604_801},
        {"bookie_check_interval_s": 0},
        {"ledger_check_interval_s": -1},
        {"ledger_check_rate": 0},
        {"ledger_check_percent": -0.5},
        {"ledger_check_percent": 100.5},
        {"placement_check_interval_s": -0.5},
        {"replica_check_interval_s": -0.5},
        {"drain_interval_s": 0},
        {"workers": -1},
        {"workers": 65},
        {"open_ledger_grace_s": -0.5},
        {"open_ledger_grace_s": 3600.5},
        {"bytes_per_s_max": 1023},
        {"bytes_per_s_min": 1023},
        {"foreground_p99_target_ms": 0},
        {"entries_in_flight_max": 0},
        {"entries_in_flight_max": 10_001},
        {"check_depth_percent": -0.5},
        {"check_depth_percent": 100.5},
    ],
    ids=str,
)
def test_values_beyond_their_bounds_are_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(WrongSettings, match=name):
        RecoverySettings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lost_bookie_delay_s": 0},
        {"lost_bookie_delay_s": 604_800},
        {"bookie_check_interval_s": 0.5},
        {"ledger_check_interval_s": 0},
        {"ledger_check_rate": 0.5},
        {"ledger_check_percent": 0},
        {"ledger_check_percent": 100},
        {"placement_check_interval_s": 0},
        {"replica_check_interval_s": 0},
        {"drain_interval_s": 0.5},
        {"workers": 0},
        {"workers": 64},
        {"open_ledger_grace_s": 0},
        {"open_ledger_grace_s": 3600},
        {"bytes_per_s_max": 1024, "bytes_per_s_min": 1024},
        {"foreground_p99_target_ms": 0.5},
        {"entries_in_flight_max": 1},
        {"entries_in_flight_max": 10_000},
        {"check_depth_percent": 0},
        {"check_depth_percent": 100},
    ],
    ids=str,
)
def test_values_at_their_bounds_are_accepted(changes: dict[str, Any]) -> None:
    settings = RecoverySettings(**changes)
    assert {name: getattr(settings, name) for name in changes} == changes


def test_copying_cannot_be_slowed_down_to_more_than_its_maximum() -> None:
    with pytest.raises(WrongSettings, match="bytes_per_s_min must not exceed bytes_per_s_max"):
        RecoverySettings(bytes_per_s_min=2049, bytes_per_s_max=2048)
