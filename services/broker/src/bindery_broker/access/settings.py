"""Settings of authorization."""

from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check


class AuthorizationSettings(Settings):
    """Authorization of the clients of the HTTP API."""

    model_config = SettingsConfigDict(env_prefix="BROKER_AUTHORIZATION_")

    enabled: bool = False
    """Allow each role only what its permissions allow. Off: every client may do everything. Source: Pulsar's
    authorizationEnabled."""

    super_user_roles: str = ""
    """Roles that may do everything, separated by commas. The role of the brokers' own token must be one of them.
    Source: Pulsar's superUserRoles."""

    allow_wildcards: bool = False
    """Permissions of a role that begins or ends with `*` apply to all roles that end or begin with the rest. Source:
    Pulsar's authorizationAllowWildcardsMatching."""

    @property
    def super_users(self) -> frozenset[str]:
        return frozenset(filter(None, (role.strip() for role in self.super_user_roles.split(","))))

    @check
    def _has_super_users(self) -> None:
        if self.enabled and not self.super_users:
            raise ValueError(
                "authorization.enabled needs at least one role in authorization.super_user_roles: without a "
                "super-user, brokers cannot call one another, and no client can grant the first permission"
            )
