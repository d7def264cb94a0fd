"""AdminTokenSettings: the tokens of operators, for the admin API of a service.

A service subclasses it with its own `env_prefix` and uses the subclass as its settings group `admin`.
"""

from collections.abc import Callable

from bindery_kit.admin.access import Access, Follow, load_verifier, once
from bindery_kit.configuration.settings import Settings


class AdminTokenSettings(Settings):
    """Tokens of operators for the HTTP API. If they are configured, requests that change something need
    `Authorization: Bearer <token>`."""

    token_file: str = ""
    """File of shared secrets of operators, one per line. Each of them is accepted, so that secrets can be replaced."""

    keys_file: str = ""
    """File of keys that sign tokens of operators: secrets (HS256), one per line as text or base64, and public keys
    (RS256, ES256, ...) as PEM; or `file:///path` of a file that is one key, as Pulsar writes them. Instead of
    `token_file`."""

    audience: str = ""
    """Name of this service in the claim `aud` of signed tokens; others are refused. Empty: tokens with an audience are
    refused."""

    @property
    def is_set(self) -> bool:
        """Whether tokens are configured."""
        return bool(self.token_file or self.keys_file or self.audience)

    def access(self, *, now_s: Callable[[], float], follow: Follow = once) -> Access | None:
        """Return the check of requests; None if no tokens are configured. `now_s`: seconds since 1970. `follow`: gets
        the file, whose changes take effect if it is followed.

        Raises BadRequest for settings that contradict each other and for unusable files.
        """
        if not self.is_set:
            return None
        verifier = load_verifier(
            secrets_file=self.token_file,
            keys_file=self.keys_file,
            audience=self.audience,
            names=("admin.token_file", "admin.keys_file"),
            follow=follow,
        )
        return Access(verifier, now_s=now_s)
