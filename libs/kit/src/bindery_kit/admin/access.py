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

Files of tokens and keys are followed: a change is in force within seconds (`bindery_kit.process.followed_files`).

The time of a comparison does not depend on how much of a token is right (`bindery_identity.tokens`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.followed import FollowedFile, FollowedFiles
from bindery_identity.keys import Key, key_file
from bindery_identity.tokens import TOKEN_SIZE_MAX, FollowedTokens, SharedSecrets, SignedTokens, TokenVerifier

Follow = Callable[[FollowedFiles[Any]], None]
"""Gets each file that must be followed: `FileFollower.follow`."""

_SCHEME: Final = b"bearer "
T = TypeVar("T")


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
        return self._verifier.verify(given[0][len(_SCHEME) :].strip(), now_s=self._now_s()).subject


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAccess:
    """The checks of requests to the admin API; None: no token is required."""

    own: Access | None
    """Of requests that change nothing but this process."""
    cluster: Access | None
    """Of requests that change the whole cluster."""


OPEN: Final = AdminAccess(own=None, cluster=None)
"""No request needs a token."""


def once(_file: FollowedFiles[Any]) -> None:
    """Do not follow the file: its content at the start stays in force."""


def load_verifier(
    *, secrets_file: str, keys_file: str, audience: str, names: tuple[str, str], follow: Follow = once
) -> TokenVerifier:
    """Return the verifier of the tokens that one of two files describes.

    `names`: the settings of the files, for errors. `audience`: empty if signed tokens must not have one. Raises
    BadRequest, also for an audience of shared secrets, which have none.
    """
    of_secrets, of_keys = names
    if bool(secrets_file) == bool(keys_file):
        raise BadRequest(f"token authentication needs one of {of_secrets} and {of_keys}")
    if audience and secrets_file:
        raise BadRequest(f"an audience needs signed tokens: set {of_keys} instead of {of_secrets}, or no audience")
    file: FollowedFile[TokenVerifier]
    if secrets_file:
        file = FollowedFile(secrets_file, lambda content: SharedSecrets(_lines(content)), what="the file of secrets")
    else:
        path, parse = key_file(keys_file)
        file = FollowedFile(
            path,
            lambda content: SignedTokens(parse(content), audience=audience or None),
            what="the file of keys",
        )
    follow(file)
    return FollowedTokens(file)


def read_secrets(path: str) -> list[bytes]:
    """Return the non-empty lines of a file, without surrounding blanks. Raises BadRequest."""
    return follow_secrets(path, lambda secrets: secrets).value


def read_keys(setting: str) -> list[Key]:
    """Return the keys in the file that a setting names (`bindery_identity.keys`). Raises BadRequest."""
    return follow_keys(setting, lambda keys: keys).value


def follow_secrets(path: str, use: Callable[[list[bytes]], T]) -> FollowedFile[T]:
    """Return what `use` makes of the non-empty lines of a file that may change. Raises BadRequest."""
    return FollowedFile(path, lambda content: use(_lines(content)), what="the file of secrets")


def follow_keys(setting: str, use: Callable[[list[Key]], T]) -> FollowedFile[T]:
    """Return what `use` makes of the keys in the file that a setting names, which may change. Raises BadRequest."""
    path, parse = key_file(setting)
    return FollowedFile(path, lambda content: use(parse(content)), what="the file of keys")


def _lines(content: bytes) -> list[bytes]:
    return [line.strip() for line in content.splitlines() if line.strip()]
