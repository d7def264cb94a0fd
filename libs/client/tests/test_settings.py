"""ClientSettings: the defaults, and combinations that are refused because they contradict each other."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from bindery_client.settings import KIB, MIB, ClientSettings


def test_sizes_are_powers_of_two() -> None:
    assert (KIB, MIB) == (1024, 1_048_576)


def test_the_defaults_for_the_wire_are_those_of_bookkeeper_3() -> None:
    settings = ClientSettings()
    assert settings.wire_version == 3
    assert settings.batch_reads is True
    assert settings.frame_size_max == 5_242_880


def test_defaults_of_limits() -> None:
    settings = ClientSettings()
    assert settings.recovery_batch_entries == 32
    assert settings.in_flight_entries_max == 2000
    assert settings.in_flight_bytes_max == 33_554_432
    assert settings.client_bytes_max == 67_108_864
    assert settings.connection_bytes_max == 134_217_728
    assert settings.read_batch_entries_max == 500
    assert settings.read_batch_bytes_max == 16_777_216


def test_a_failed_bookie_is_replaced_before_the_add_fails() -> None:
    settings = ClientSettings()
    assert settings.add_timeout_s < settings.add_quorum_timeout_s


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ClientSettings().wire_version = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"wire_version": 1},
        {"wire_version": 4},
        {"bookie_info_interval_s": -1.0},
        {"reconnect_pause_s": 0.0},
        {"reconnect_pause_s": 2.0, "reconnect_pause_s_max": 1.0},
        {"add_timeout_s": 0.0},
        {"add_timeout_s": 31.0},
        {"speculative_read_s": -0.1},
        {"in_flight_entries_max": 0},
        {"in_flight_bytes_max": 64 * MIB + 1},
        {"client_bytes_max": 128 * MIB},
        {"recovery_batch_entries": 0},
        {"read_batch_entries_max": 0},
        {"timer_tick_s": 0.0},
        {"timer_tick_s": 1.0, "add_timeout_s": 1.0},
        {"timer_tick_s": 1.0, "read_timeout_s": 1.0},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        ClientSettings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"wire_version": 2},
        {"reconnect_pause_s": 1.0, "reconnect_pause_s_max": 1.0},
        {"add_timeout_s": 30.0},
        {"speculative_read_s": 0.0},
        {"in_flight_entries_max": 1},
        {"in_flight_bytes_max": 64 * MIB},
        {"client_bytes_max": 128 * MIB - 1},
        {"recovery_batch_entries": 1},
        {"read_batch_entries_max": 1},
    ],
    ids=str,
)
def test_settings_at_their_bounds_are_accepted(changes: dict[str, Any]) -> None:
    settings = ClientSettings(**changes)
    assert {name: getattr(settings, name) for name in changes} == changes
