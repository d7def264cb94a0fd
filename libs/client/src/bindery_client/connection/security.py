"""ClientSecurity: TLS and credentials of the connections from a client to bookies.

Only `load_security` reads certificates and tokens from files. They are read again if they have changed: before a new
connection, and every RENEWAL_CHECK_S seconds by the pool, which then replaces the connections that use earlier ones
(`pool`): servers end connections whose token or certificate has expired. Settings, options and tasks hold the names of
the files, as SecurityFiles:

| option           | environment variable            | content                                                       |
|------------------|---------------------------------|---------------------------------------------------------------|
| token_file       | BINDERY_CLIENT_TOKEN_FILE       | first line: the token to present to each bookie               |
| ca_file          | BINDERY_CLIENT_CA_FILE          | certificate authority of the bookies; empty: no TLS           |
| certificate_file | BINDERY_CLIENT_CERTIFICATE_FILE | the certificate to present                                    |
| key_file         | BINDERY_CLIENT_KEY_FILE         | the key of the certificate, not encrypted                     |
| auth_plugin      | BINDERY_CLIENT_PLUGIN           | name of the bookies' authentication plugin (`bindery`)        |
| check_hostname   | BINDERY_CLIENT_CHECK_HOSTNAME   | false: the certificate may name another host than was reached |
| http_ca_file     | BINDERY_HTTP_CA_FILE            | certificate authority of https ports, for audits that call    |
|                  |                                 | the bookies' HTTP ports; empty: that of `ca_file`             |
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bindery_core.errors import BadRequest
from bindery_identity.followed import FollowedFiles
from bindery_identity.tls import FollowedContext, TlsFiles, client_tls
from bindery_identity.token_file import TokenFile

RENEWAL_CHECK_S: Final = 1.0
"""Seconds between two checks whether the files of credentials have changed. Services accept tokens for longer after
their `exp` (`bindery_identity.tokens.CLOCK_SKEW_S`)."""
PLUGIN: Final = "bindery"
"""Default authentication plugin: the one of Bindery's bookies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """TLS and credentials, shared by all connections of a client."""

    tls: ssl.SSLContext | None = None
    """If set, every connection is secured by START_TLS before anything else is sent; None: no encryption."""
    plugin: str = PLUGIN
    """Name of the bookies' auth provider."""
    token: bytes | None = field(default=None, repr=False)
    """Sent to each bookie before any request. None: not sent; a certificate may suffice, or no token is required."""
    token_files: FollowedFiles[bytes] | None = field(default=None, repr=False, compare=False)
    """The files from which `token` was made; None: it never changes."""

    @property
    def is_needed(self) -> bool:
        """Whether a new connection needs START_TLS or authentication before requests."""
        return self.tls is not None or self.token is not None

    @property
    def current_token(self) -> bytes | None:
        """`token`, as its files were when they were last read and usable."""
        return self.token if self.token_files is None else self.token_files.value

    @property
    def files(self) -> tuple[FollowedFiles[Any], ...]:
        """All files that may change."""
        return tuple(files for files in (self.token_files, self.tls_files) if files is not None and files.paths)

    @property
    def generation(self) -> int:
        """Number of times that the files were read again with success."""
        return sum(files.replacements for files in self.files)

    def poll(self) -> None:
        """Read the files again if they have changed. Blocks for the time of the file system's calls. Never raises."""
        for files in self.files:
            files.poll()

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of `tls`, for metrics and a poller that reports failures; None without files."""
        return self.tls.files if isinstance(self.tls, FollowedContext) else None


NO_SECURITY: Final = ClientSecurity()
"""Neither TLS nor a token."""


def load_security(
    *,
    ca_file: str | Path | None = None,
    certificate_file: str | Path | None = None,
    key_file: str | Path | None = None,
    check_hostname: bool = True,
    token_file: str | Path | None = None,
    plugin: str = PLUGIN,
    now_s: Callable[[], float] | None = None,
) -> ClientSecurity:
    """Load PEM files and a file whose first line is the token. TLS is used if `ca_file` is given.

    `certificate_file`, `key_file`: presented to bookies that require client certificates. `check_hostname`: the
    bookie's certificate must name the host that the client connects to. `now_s`: seconds since 1970, to refuse an own
    certificate that has expired and to know when it does; None: bookies refuse it. Raises BadRequest for files that
    cannot be used.
    """
    if ca_file is None and certificate_file is not None:
        raise BadRequest("a client certificate requires ca_file too: it is used with TLS only")
    tokens: TokenFile | None = None
    context = None
    try:
        if ca_file is not None:
            context = client_tls(
                ca_file=str(ca_file),
                certificate_file="" if certificate_file is None else str(certificate_file),
                key_file="" if key_file is None else str(key_file),
                check_hostname=check_hostname,
                now_s=now_s,
            ).context
        if token_file is not None:
            tokens = TokenFile(str(token_file))
    except BadRequest as error:
        raise BadRequest(
            f"cannot load the client's TLS or token files: {error}",
            ca_file=ca_file,
            certificate_file=certificate_file,
            key_file=key_file,
            token_file=token_file,
        ) from error
    token = None if tokens is None else tokens.value
    return ClientSecurity(tls=context, plugin=plugin, token=token, token_files=tokens)


VARIABLES: Final = {
    "token_file": "BINDERY_CLIENT_TOKEN_FILE",
    "ca_file": "BINDERY_CLIENT_CA_FILE",
    "certificate_file": "BINDERY_CLIENT_CERTIFICATE_FILE",
    "key_file": "BINDERY_CLIENT_KEY_FILE",
    "auth_plugin": "BINDERY_CLIENT_PLUGIN",
    "check_hostname": "BINDERY_CLIENT_CHECK_HOSTNAME",
    "http_ca_file": "BINDERY_HTTP_CA_FILE",
}
"""Environment variable by option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFiles:
    """Names of files; empty: none. It can be pickled and holds no secret."""

    token_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    auth_plugin: str = PLUGIN
    check_hostname: bool = True
    http_ca_file: str = ""

    @classmethod
    def of(cls, options: Mapping[str, str], environment: Mapping[str, str]) -> "SecurityFiles":
        """Take each option from `options` or, if it is missing or empty there, from its variable. Raises BadRequest."""
        given = {name: options.get(name) or environment.get(variable, "") for name, variable in VARIABLES.items()}
        checked = given.pop("check_hostname").lower() or "true"
        if checked not in ("true", "false"):
            raise BadRequest("option check_hostname must be one of true, false", value=checked)
        plugin = given.pop("auth_plugin") or PLUGIN
        return cls(**given, auth_plugin=plugin, check_hostname=checked == "true")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, *, now_s: Callable[[], float] | None = None) -> ClientSecurity:
        """Read the files. `now_s`: see `load_security`. Raises BadRequest if they are unusable."""
        return load_security(
            ca_file=self.ca_file or None,
            certificate_file=self.certificate_file or None,
            key_file=self.key_file or None,
            check_hostname=self.check_hostname,
            token_file=self.token_file or None,
            plugin=self.auth_plugin,
            now_s=now_s,
        )


NO_FILES: Final = SecurityFiles()
"""Neither TLS nor a token."""
