"""Access lists of nodes: which clients of ZooKeeper may read, change and delete a node. Pure.

A list consists of entries `scheme:id:permissions`. ZooKeeper checks each node's own list; nodes inherit nothing.

| new_nodes | list of a node that a client creates                | reads need  | changes need |
|-----------|-----------------------------------------------------|-------------|--------------|
| open      | world:anyone:cdrwa                                  | nothing     | nothing      |
| creator   | digest:<user>:<hash>:cdrwa                          | the digest  | the digest   |
| shared    | digest:<user>:<hash>:cdrwa, world:anyone:r          | nothing     | the digest   |

Permissions: c create children, d delete children, r read data and the names of children, w write data, a change the
list. <hash>: base64 of SHA-1 of "user:password", as ZooKeeper computes it by default (DigestAuthenticationProvider); a
server with another `digestAlg` computes other identities.

A file of credentials holds one "user:password" per line. A client presents all of them. Its new nodes belong to the
first one, so that a password can be replaced without locking anyone out.
"""

import base64
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bindery_core.errors import BadRequest

READ: Final = 1
WRITE: Final = 2
CREATE: Final = 4
DELETE: Final = 8
ADMIN: Final = 16
ALL: Final = READ | WRITE | CREATE | DELETE | ADMIN
_LETTERS: Final = ((CREATE, "c"), (DELETE, "d"), (READ, "r"), (WRITE, "w"), (ADMIN, "a"))

CREDENTIALS_MAX: Final = 8
"""Maximum number of lines of a file of credentials."""
CREDENTIAL_SIZE_MAX: Final = 1024
"""Maximum bytes of a line of a file of credentials."""


class NewNodes(StrEnum):
    """The access list of new nodes; the table of the module."""

    OPEN = "open"
    CREATOR = "creator"
    SHARED = "shared"


class Kind(StrEnum):
    """What an access list means for a client with certain credentials, see `kind_of`."""

    OPEN = "open"
    SHARED = "shared"
    CREATOR = "creator"
    PREVIOUS = "previous"
    OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One entry of a list: what clients with an identity may do."""

    scheme: str
    id: str
    permissions: int
    """Bits: READ, WRITE, CREATE, DELETE, ADMIN."""

    def __str__(self) -> str:
        letters = "".join(letter for bit, letter in _LETTERS if self.permissions & bit)
        return f"{self.scheme}:{self.id}:{letters}"


AccessList = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """The access list of a node, as it is stored."""

    entries: AccessList
    version: int
    """Version of the list: 0 after the creation of the node, one more after each replacement."""
    is_ephemeral: bool
    children_count: int


OPEN_LIST: Final[AccessList] = (Entry("world", "anyone", ALL),)


@dataclass(frozen=True, slots=True)
class Credential:
    """A user and a password for ZooKeeper's scheme `digest`."""

    user: str
    password: str = field(repr=False)

    @property
    def secret(self) -> str:
        """The text that a client presents."""
        return f"{self.user}:{self.password}"

    @property
    def identity(self) -> str:
        """The id in access lists: "user:hash"."""
        digest = hashlib.sha1(self.secret.encode(), usedforsecurity=False).digest()  # ZooKeeper defines the algorithm
        return f"{self.user}:{base64.b64encode(digest).decode('ascii')}"


def parse_credentials(content: bytes) -> tuple[Credential, ...]:
    """Return the credentials of a file: one "user:password" per line; blank lines are ignored.

    Raises BadRequest, which contains no part of the file, for a file without credentials, with more than
    CREDENTIALS_MAX, with a line above CREDENTIAL_SIZE_MAX bytes, or with a line of another form.
    """
    found: list[Credential] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        if len(line) > CREDENTIAL_SIZE_MAX:
            raise BadRequest("a line of the file of ZooKeeper credentials is too long", line=number)
        try:
            user, colon, password = line.decode().strip().partition(":")
        except UnicodeDecodeError:
            raise BadRequest("a line of the file of ZooKeeper credentials is not UTF-8", line=number) from None
        if not (user and colon and password and f"{user}{password}".isprintable()):
            raise BadRequest(
                "a line of the file of ZooKeeper credentials does not have the form user:password", line=number
            )
        found.append(Credential(user, password))
    if not found:
        raise BadRequest("the file of ZooKeeper credentials is empty; write user:password into it")
    if len(found) > CREDENTIALS_MAX:
        raise BadRequest("the file has too many ZooKeeper credentials", found=len(found), maximum=CREDENTIALS_MAX)
    return tuple(found)


def list_of(new_nodes: NewNodes, credentials: Sequence[Credential]) -> AccessList:
    """Return the list of new nodes. Only OPEN allows an empty sequence of credentials."""
    if new_nodes is NewNodes.OPEN:
        return OPEN_LIST
    own = Entry("digest", credentials[0].identity, ALL)
    return (own, Entry("world", "anyone", READ)) if new_nodes is NewNodes.SHARED else (own,)


def kind_of(entries: Collection[Entry], credentials: Sequence[Credential]) -> Kind:
    """Return the kind of a node's list. The first row that applies counts.

    | kind     | the list                                                                                 |
    |----------|------------------------------------------------------------------------------------------|
    | OPEN     | allows anyone more than to read                                                          |
    | CREATOR  | exactly that of `creator`                                                                |
    | SHARED   | exactly that of `shared`                                                                 |
    | PREVIOUS | exactly that of `creator` or `shared` for another one of the credentials than the first  |
    | OTHER    | anything else: it names other identities, or further ones                                |
    """
    if any(entry.scheme == "world" and entry.permissions & ~READ for entry in entries):
        return Kind.OPEN
    for index, credential in enumerate(credentials):
        for new_nodes, kind in ((NewNodes.CREATOR, Kind.CREATOR), (NewNodes.SHARED, Kind.SHARED)):
            if set(entries) == set(list_of(new_nodes, (credential,))):
                return kind if index == 0 else Kind.PREVIOUS
    return Kind.OTHER
