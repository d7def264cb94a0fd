"""Settings of recovery inside a bookie (`autorecovery_embedded`)."""

from bindery_kit.configuration.settings import SettingsConfigDict
from bindery_recovery.settings import RecoverySettings


class EmbeddedRecoverySettings(RecoverySettings):
    """The settings of an auditor process, with another prefix in the environment."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_RECOVERY_")
