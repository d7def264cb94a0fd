"""OwnToken: the token with which a process authenticates at other processes of its kind, and acts for its clients.

The headers of a request:

| header          | request of a client that is passed on          | request of the process itself      |
|-----------------|------------------------------------------------|------------------------------------|
| authorization   | the token of the process, not the client's     | the token of the process           |
| bindery-role    | the role of the client                         | the role of the process            |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.followed import FollowedFile
from bindery_identity.principal import Principal
from bindery_identity.tokens import is_subject, unverified

from bindery_kit.access.authenticate import ORIGINAL_HEADER, ROLE_HEADER

CREDENTIALS: Final = frozenset((b"authorization", ROLE_HEADER, ORIGINAL_HEADER))
"""Headers of a client that are never passed on by a process with a token of its own."""
NO_CLAIMS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class _Token:
    text: bytes = field(repr=False)
    """The secret: it never appears in a repr."""
    role: str


class OwnToken:
    """The first line of a followed file. `role_claim`: the claim that is the role; `role_claims`: the same by issuer
    (`iss`), for the tokens of these issuers. `check`: gets the role of a token, and raises BadRequest if it cannot be
    used.

    The constructor raises BadRequest if the file is not a signed token with a role, and what `check` raises. A file
    that is replaced by such a one changes nothing.
    """

    def __init__(
        self,
        path: str,
        *,
        role_claim: str = "sub",
        role_claims: Mapping[str, str] = NO_CLAIMS,
        check: Callable[[str], None] = lambda role: None,
    ) -> None:
        def load(content: bytes) -> _Token:
            text = (content.split() or [b""])[0]
            try:
                claims = unverified(text)[1]
            except Unauthorized:
                raise BadRequest("the file must contain a signed token, as `bindery tokens create` prints it") from None
            issuer = claims.get("iss")
            claim = role_claims.get(issuer, role_claim) if isinstance(issuer, str) else role_claim
            role = claims.get(claim)
            if isinstance(role, list) and role:
                role = role[0]
            if not isinstance(role, str) or not is_subject(role):
                raise BadRequest("the token has no role", claim=claim)
            check(role)
            return _Token(text, role)

        self.file = FollowedFile(path, load, what="the file of the token")

    @property
    def role(self) -> str:
        """The role that the token names. Its signature is verified by those that receive it."""
        return self.file.value.role

    @property
    def text(self) -> bytes:
        return self.file.value.text

    def headers(self, client: Principal | None) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request on behalf of `client`; None: of the process itself."""
        role = self.role if client is None else client.original_role or client.role
        return [
            (b"authorization", b"Bearer " + self.text),
            (ROLE_HEADER, quote(role, safe="").encode()),
        ]
