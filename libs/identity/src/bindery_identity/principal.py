"""The client of a connection or a request, as its credentials prove it."""

import enum
from dataclasses import dataclass
from typing import Final


class Method(enum.StrEnum):
    """How a client proved who it is. The values are Pulsar's names of authentication methods where it has one."""

    NONE = "none"
    """No credentials: the role for anonymous clients."""
    TOKEN = "token"  # noqa: S105
    OIDC = "oidc"
    CERTIFICATE = "tls"
    BASIC = "basic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """`role`: the name by which permissions are granted, printable and not empty; Pulsar's role.

    `original_role`: the client on whose behalf a proxy, or another broker, sent this request; None if it is the proxy's
    own request. Source: Pulsar's original principal.
    """

    role: str
    method: Method
    expires_at_s: float | None = None
    """When the credentials expire, in seconds since 1970; None: never."""
    original_role: str | None = None


ANONYMOUS_ROLE: Final = "anonymous"
"""Default role of clients without credentials, where they are allowed. Source: Pulsar's anonymousUserRole."""
