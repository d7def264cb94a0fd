"""The settings of recovery inside a bookie are those of an auditor with another prefix."""

import pytest
from bindery_bookie.autorecovery.embedded_settings import EmbeddedRecoverySettings
from bindery_recovery.settings import RecoverySettings


def test_the_environment_has_a_prefix_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = RecoverySettings.model_config["env_prefix"]
    assert prefix != "BOOKIE_RECOVERY_"
    monkeypatch.setenv(f"{prefix}WORKERS", "3")
    monkeypatch.setenv("BOOKIE_RECOVERY_WORKERS", "5")
    assert EmbeddedRecoverySettings().workers == 5
    assert RecoverySettings().workers == 3


def test_the_defaults_are_those_of_an_auditor() -> None:
    own, others = EmbeddedRecoverySettings().effective(), RecoverySettings().effective()
    assert [(one.name, one.value) for one in own] == [(one.name, one.value) for one in others]
    assert own
