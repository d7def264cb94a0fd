"""ManagedLedgerSettings: the defaults, their bounds, and the variables that set them."""

from typing import Any

import pytest
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_kit.configuration.settings import WrongSettings


def test_the_defaults() -> None:
    assert dict(ManagedLedgerSettings()) == {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "entries_max": 50_000,
        "size_max": 2_147_483_648,
        "age_s_max": 14_400,
        "age_s_min": 600,
        "inactive_s_max": 1800,
        "pending_size_max": 67_108_864,
        "add_timeout_s": 30,
        "operation_timeout_s": 30,
        "retry_pause_s": 0.1,
        "retry_pause_s_max": 5,
        "cache_size_max": 67_108_864,
        "read_handles_max": 16,
        "retention_acked_s": 0,
        "retention_unsubscribed_s": 604_800,
        "cursor_entries_max": 50_000,
        "cursor_age_s_max": 14_400,
        "cursor_size_max": 33_554_432,
        "cursor_changes_size_max": 1_048_576,
        "cursor_state_size_max": 268_435_456,
        "cursor_inline_size_max": 32_768,
    }


def test_a_variable_sets_the_field_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_LEDGER_ENTRIES_MAX", "7")
    assert ManagedLedgerSettings().entries_max == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"ensemble_size": 0},
        {"write_quorum": 0},
        {"ack_quorum": 0},
        {"entries_max": 0},
        {"size_max": 0},
        {"age_s_max": 0},
        {"age_s_min": -0.5},
        {"pending_size_max": 0},
        {"add_timeout_s": 0},
        {"operation_timeout_s": 0},
        {"retry_pause_s": 0},
        {"retry_pause_s_max": 0},
        {"cache_size_max": -1},
        {"read_handles_max": 0},
        {"retention_acked_s": -0.5},
        {"retention_unsubscribed_s": -0.5},
        {"cursor_entries_max": 0},
        {"cursor_age_s_max": 0},
        {"cursor_size_max": 0},
        {"cursor_changes_size_max": 0},
        {"cursor_state_size_max": 1023},
        {"cursor_inline_size_max": 255},
    ],
)
def test_a_value_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WrongSettings, match=next(iter(changes))):
        ManagedLedgerSettings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "entries_max": 1, "size_max": 1},
        {"age_s_max": 0.01, "age_s_min": 0, "pending_size_max": 1, "add_timeout_s": 0.01, "operation_timeout_s": 0.01},
        {"retry_pause_s": 0.01, "retry_pause_s_max": 0.01, "cache_size_max": 0, "read_handles_max": 1},
        {"retention_acked_s": 0, "retention_unsubscribed_s": 0, "cursor_entries_max": 1, "cursor_age_s_max": 0.01},
        {"cursor_size_max": 1, "cursor_changes_size_max": 1},
        {"cursor_state_size_max": 1024, "cursor_inline_size_max": 256},
    ],
)
def test_the_smallest_values_are_accepted(changes: dict[str, Any]) -> None:
    settings = dict(ManagedLedgerSettings(**changes))
    assert {name: settings[name] for name in changes} == changes
