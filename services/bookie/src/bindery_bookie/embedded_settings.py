"""What can be turned of the healing inside a bookie (`autorecovery_embedded`). Imported only where somebody does."""

from bindery_kit.configuration.settings import SettingsConfigDict
from bindery_recovery.settings import RecoverySettings


class EmbeddedRecoverySettings(RecoverySettings):
    """As an auditor's."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_RECOVERY_")
