"""Access: check the bearer tokens of requests to an admin API.

| service                 | what needs a token                                                                        |
|-------------------------|-------------------------------------------------------------------------------------------|
| no Access               | nothing: the port is bound to loopback, or the operator passed `--insecure`               |
| Access with a verifier  | every method except GET and HEAD, and guarded GETs: `Authorization: Bearer <token>`, a    |
|                         | shared secret or a signed token                                                           |
| Access without verifier | the same requests, and every token is refused                                             |

A bookie has an Access if its ledger port authenticates (`auth.provider`), and accepts the same tokens. An auditor has
one if it has a file of secrets, or if other machines can connect.

The time of a comparison does not depend on how much of a token is right (`bindery_core.auth_token`). The port has no
TLS: if other machines can connect, put a proxy with TLS in front of it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from bindery_core.auth_token import TOKEN_SIZE_MAX, TokenVerifier
from bindery_core.errors import BadRequest, Unauthorized

_SCHEME: Final = b"bearer "


class Access:
    """`verifier`: None refuses every token. `now_s`: seconds since 1970. `hint`: how to configure a verifier."""

    def __init__(self, verifier: TokenVerifier | None, *, now_s: Callable[[], float], hint: str = "") -> None:
        self._verifier = verifier
        self._now_s = now_s
        self._hint = hint

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the name in the request's token. Raises Unauthorized with the reason, but no part of the token."""
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if not given:
            raise Unauthorized("this request needs a token: send Authorization: Bearer <token>")
        if len(given) > 1 or given[0][: len(_SCHEME)].lower() != _SCHEME or len(given[0]) > TOKEN_SIZE_MAX:
            raise Unauthorized("one header Authorization: Bearer <token> is expected")
        if self._verifier is None:
            raise Unauthorized(f"no tokens are configured: {self._hint}")
        return self._verifier.verify(given[0][len(_SCHEME) :].strip(), now_s=self._now_s())


def read_secrets(path: str) -> list[bytes]:
    """Return the non-empty lines of a file, without surrounding blanks. Raises BadRequest."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read the file of secrets: {error.strerror}", path=path) from error
    return [line.strip() for line in text.splitlines() if line.strip()]
