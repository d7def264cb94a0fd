"""Access: check the bearer tokens of requests to an admin API.

| service                 | what needs a token                                                                        |
|-------------------------|-------------------------------------------------------------------------------------------|
| no Access               | nothing: the port is bound to loopback, or the operator passed `--insecure`               |
| Access with a verifier  | every method except GET and HEAD, and guarded GETs: `Authorization: Bearer <token>`, a    |
|                         | shared secret or a signed token                                                           |
| Access without verifier | the same requests, and every token is refused                                             |

A second Access checks changes of the whole cluster. If other machines can connect, they need a token of an operator
(`admin`), on each port that serves them: otherwise a bookie without tokens, or the token of a bookie's client, would
get around the auditor's token.

| port                      | tokens configured | changes of this process | changes of the cluster |
|---------------------------|-------------------|-------------------------|------------------------|
| any                       | `admin`           | `admin` token           | `admin` token          |
| bookie, loopback          | `auth`            | `auth` token            | `auth` token           |
| bookie, reachable         | `auth`            | `auth` token            | refused                |
| any, loopback             | none              | free                    | free                   |
| bookie, `--insecure`      | none              | free                    | refused                |
| auditor, `--insecure`     | none              | -                       | refused                |

The time of a comparison does not depend on how much of a token is right (`bindery_core.auth_token`). The port has no
TLS: if other machines can connect, put a proxy with TLS in front of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from bindery_core.auth_token import TOKEN_SIZE_MAX, SharedSecrets, SignedTokens, TokenVerifier, parse_keys
from bindery_core.errors import BadRequest, Unauthorized

_SCHEME: Final = b"bearer "
_FILE: Final = "file:"


class Access:
    """`verifier`: None refuses every token. `now_s`: seconds since 1970. `hint`: how to configure a verifier."""

    def __init__(self, verifier: TokenVerifier | None, *, now_s: Callable[[], float], hint: str = "") -> None:
        self._verifier = verifier
        self._now_s = now_s
        self._hint = hint

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the name in the request's token. Raises Unauthorized with the reason, but no part of the token."""
        if self._verifier is None:
            raise Unauthorized(f"no tokens are configured: {self._hint}")
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if not given:
            raise Unauthorized("this request needs a token: send Authorization: Bearer <token>")
        if len(given) > 1 or given[0][: len(_SCHEME)].lower() != _SCHEME or len(given[0]) > TOKEN_SIZE_MAX:
            raise Unauthorized("one header Authorization: Bearer <token> is expected")
        return self._verifier.verify(given[0][len(_SCHEME) :].strip(), now_s=self._now_s())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAccess:
    """The checks of requests to the admin API; None: no token is required."""

    own: Access | None
    """Of requests that change nothing but this process."""
    cluster: Access | None
    """Of requests that change the whole cluster."""


OPEN: Final = AdminAccess(own=None, cluster=None)
"""No request needs a token."""


def load_verifier(*, secrets_file: str, keys_file: str, audience: str, names: tuple[str, str]) -> TokenVerifier:
    """Return the verifier of the tokens that one of two files describes.

    `names`: the settings of the files, for errors. `audience`: empty if signed tokens must not have one. Raises
    BadRequest, also for an audience of shared secrets, which have none.
    """
    of_secrets, of_keys = names
    if bool(secrets_file) == bool(keys_file):
        raise BadRequest(f"token authentication needs one of {of_secrets} and {of_keys}")
    if not secrets_file:
        return SignedTokens(read_keys(keys_file), audience=audience or None)
    if audience:
        raise BadRequest(f"an audience needs signed tokens: set {of_keys} instead of {of_secrets}, or no audience")
    return SharedSecrets(read_secrets(secrets_file))


def read_secrets(path: str) -> list[bytes]:
    """Return the non-empty lines of a file, without surrounding blanks. Raises BadRequest."""
    return [line.strip() for line in _read(path, "secrets").splitlines() if line.strip()]


def read_keys(path: str) -> list[bytes]:
    """Return the signing keys in a file (`bindery_core.auth_token.parse_keys`).

    A URL `file:///path` names a file whose bytes are one key, as `pulsar tokens create-secret-key` writes it. Raises
    BadRequest.
    """
    if path[: len(_FILE)].lower() == _FILE:
        url = urlsplit(path)
        if url.netloc not in ("", "localhost") or not url.path.startswith("/") or url.query or url.fragment:
            raise BadRequest("the URL of a key file must be file:///<absolute path>", url=path)
        return [_read(unquote_to_bytes(url.path).decode("utf-8", "surrogateescape"), "keys")]
    text = _read(path, "keys")
    try:
        return parse_keys(text)
    except BadRequest as error:
        raise BadRequest(error.message, path=path, **error.facts) from None


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadRequest(f"cannot read the file of {what}: {getattr(error, 'strerror', error)}", path=path) from error
