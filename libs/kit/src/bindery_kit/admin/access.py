"""Access: who may change something over an admin port, or read what entries hold.

| there is                  | what asks for a token                                                                    |
|---------------------------|------------------------------------------------------------------------------------------|
| no Access                 | nothing: the port is bound to loopback, or the operator said `--insecure`                |
| an Access                 | every method but GET and HEAD, and guarded GETs: `Authorization: Bearer <token>`, a      |
|                           | shared secret or a signed token                                                          |
| an Access without verifier| the same, and no token is good enough                                                    |

A bookie has one when its ledger port authenticates (`auth.provider`), and takes the same tokens; an auditor when it was
given a file of secrets.
Comparing takes the same time whatever is right of a token (`bindery_core.auth_token`). The port speaks no TLS: where
others can listen, put something in front that does.
"""

from collections.abc import Callable, Iterable
from typing import Final

from bindery_core.auth_token import TOKEN_SIZE_MAX, TokenVerifier
from bindery_core.errors import Unauthorized

_SCHEME: Final = b"bearer "


class Access:
    """`verifier` None: no token is good enough, and `hint` says what is missing. `now_s`: seconds of 1970."""

    def __init__(
        self,
        verifier: TokenVerifier | None,
        *,
        now_s: Callable[[], float],
        hint: str = "set auth.secrets_file or auth.keys_file of this bookie",
    ) -> None:
        self._verifier = verifier
        self._now_s = now_s
        self._hint = hint

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Whom the request's token names. Raises Unauthorized, which says why but shows nothing of the token."""
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if not given:
            raise Unauthorized("this needs a token: send Authorization: Bearer <token>")
        if len(given) > 1 or given[0][: len(_SCHEME)].lower() != _SCHEME or len(given[0]) > TOKEN_SIZE_MAX:
            raise Unauthorized("one header Authorization: Bearer <token> is expected")
        if self._verifier is None:
            raise Unauthorized(f"no token can be checked here: {self._hint}")
        return self._verifier.verify(given[0][len(_SCHEME) :].strip(), now_s=self._now_s())
