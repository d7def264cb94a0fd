"""ClientSecurity: how a client encrypts its connections to bookies and shows them who it is.

`load_security` is the one place here that reads certificates and tokens, from files, once.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bindery_core.errors import BadRequest

PLUGIN: Final = "bindery"
"""What our bookies call their authentication unless they were told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """Shared by all connections of a client."""

    tls: ssl.SSLContext | None = None
    """Every connection is secured by START_TLS before anything else is sent; None: nothing is encrypted."""
    plugin: str = PLUGIN
    """Name of the bookies' auth provider."""
    token: bytes | None = field(default=None, repr=False)
    """Sent to each bookie before any request. None: nothing is sent; a certificate may do, or nobody asks."""

    @property
    def is_needed(self) -> bool:
        """Whether a new connection has anything to say before requests."""
        return self.tls is not None or self.token is not None


NO_SECURITY: Final = ClientSecurity()


def load_security(
    *,
    ca_file: str | Path | None = None,
    certificate_file: str | Path | None = None,
    key_file: str | Path | None = None,
    check_hostname: bool = True,
    token_file: str | Path | None = None,
    plugin: str = PLUGIN,
) -> ClientSecurity:
    """From PEM files and a file that holds the token. TLS is used when `ca_file` is given.

    `certificate_file`, `key_file`: what this client shows where bookies ask for certificates. `check_hostname`: the
    bookie's certificate must name the host that it was reached by. Raises BadRequest for files that are no use.
    """
    if ca_file is None and certificate_file is not None:
        raise BadRequest("a client certificate needs ca_file too: without TLS nobody sees it")
    token = None
    context = None
    try:
        if ca_file is not None:
            context = ssl.create_default_context(cafile=str(ca_file))
            context.check_hostname = check_hostname
            if certificate_file is not None:
                context.load_cert_chain(certificate_file, key_file, password=lambda: b"")
        if token_file is not None:
            token = Path(token_file).read_bytes().strip()
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(
            f"cannot use the files of the client's security: {error.strerror or error}",
            ca_file=ca_file, certificate_file=certificate_file, key_file=key_file, token_file=token_file,
        ) from error  # fmt: skip
    if token == b"":
        raise BadRequest("the token file is empty", token_file=token_file)
    return ClientSecurity(tls=context, plugin=plugin, token=token)
