"""ZooKeeperAccess: TLS and credentials of a connection to ZooKeeper, and the access list of new nodes.

Settings and options hold the names of the files, as AccessFiles. `bindery` commands and Spark jobs take them from the
environment, services from their settings group `zookeeper_access`:

| option           | environment variable               | content                                                      |
|------------------|------------------------------------|--------------------------------------------------------------|
| ca_file          | BINDERY_ZOOKEEPER_CA_FILE          | authority of the servers' certificates (PEM); empty: no TLS  |
| certificate_file | BINDERY_ZOOKEEPER_CERTIFICATE_FILE | certificate to present (PEM); empty: none                    |
| key_file         | BINDERY_ZOOKEEPER_KEY_FILE         | its key (PEM, not encrypted)                                 |
| credentials_file | BINDERY_ZOOKEEPER_CREDENTIALS_FILE | user:password per line (`access_lists`)                      |
| new_nodes        | BINDERY_ZOOKEEPER_NEW_NODES        | open, creator or shared (`access_lists`)                     |

The files are read at the start and, if they have changed, before each connection. Files that cannot be used then leave
the last good ones in force.

The certificate of a server must name the host that the server list names, always: a certificate of the same authority
for another host proves nothing about this server.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_identity.followed import FollowedFiles
from bindery_identity.tls import configure_client

from bindery_metadata.stores.access_lists import AccessList, Credential, NewNodes, list_of, parse_credentials

VARIABLES: Final = {
    "ca_file": "BINDERY_ZOOKEEPER_CA_FILE",
    "certificate_file": "BINDERY_ZOOKEEPER_CERTIFICATE_FILE",
    "key_file": "BINDERY_ZOOKEEPER_KEY_FILE",
    "credentials_file": "BINDERY_ZOOKEEPER_CREDENTIALS_FILE",
    "new_nodes": "BINDERY_ZOOKEEPER_NEW_NODES",
}
"""Environment variable by option."""


class ConnectionRefused(MetadataUnavailable):
    """No connection by TLS: the certificate of a server was refused, or the server refused this client."""


def variable_of(option: str) -> str:
    """Return the name of an option for the users of commands."""
    return VARIABLES[option]


@dataclass(frozen=True, slots=True)
class Presented:
    """What one connection uses, as the files were when it began."""

    tls: ssl.SSLContext | None = None
    """None: no TLS."""
    credentials: tuple[Credential, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFiles:
    """Names of files; empty: none. It can be pickled and holds no secret."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    credentials_file: str = ""
    new_nodes: NewNodes = NewNodes.OPEN

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "AccessFiles":
        """Take the options from the environment. Raises BadRequest, with the variable's name."""
        given = {option: environment.get(variable, "") for option, variable in VARIABLES.items()}
        text = given.pop("new_nodes").lower() or NewNodes.OPEN.value
        if text not in list(NewNodes):
            raise BadRequest(f"{variable_of('new_nodes')} must be one of {', '.join(NewNodes)}", value=text)
        return cls(**given, new_nodes=NewNodes(text))

    def variables(self) -> dict[str, str]:
        """Return the environment from which `of` takes these options, without those that are empty."""
        return {name: str(value) for option, name in VARIABLES.items() if (value := getattr(self, option))}

    def load(self, name_of: Callable[[str], str] = variable_of) -> "ZooKeeperAccess":
        """Read the files. `name_of`: the name of an option in errors. Raises BadRequest if they cannot be used."""
        if (self.certificate_file or self.key_file) and not self.ca_file:
            raise BadRequest(f"a certificate for ZooKeeper requires {name_of('ca_file')} too: it is used with TLS only")
        if bool(self.certificate_file) != bool(self.key_file):
            raise BadRequest(f"set both {name_of('certificate_file')} and {name_of('key_file')}, or neither")
        if self.new_nodes is not NewNodes.OPEN and not self.credentials_file:
            raise BadRequest(
                f"{name_of('new_nodes')}={self.new_nodes.value} requires {name_of('credentials_file')}: "
                "without credentials, this process could not use its own nodes"
            )
        options = {
            option: path
            for option in ("ca_file", "certificate_file", "key_file", "credentials_file")
            if (path := getattr(self, option))
        }
        if not options:
            return ZooKeeperAccess(None, self.new_nodes)
        try:
            followed = FollowedFiles(list(options.values()), lambda contents: self._parse(list(options), contents))
        except BadRequest as error:
            raise BadRequest(
                f"cannot use the files for ZooKeeper: {error}; check {', '.join(map(name_of, options))}"
            ) from error
        return ZooKeeperAccess(followed, self.new_nodes)

    def _parse(self, options: Sequence[str], contents: Sequence[bytes]) -> Presented:
        """Return what the files contain. Raises BadRequest."""
        content = dict(zip(options, contents, strict=True))
        tls = None
        if self.ca_file:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            pair = (content["certificate_file"], content["key_file"]) if self.certificate_file else None
            configure_client(tls, authorities=content["ca_file"], pair=pair)
        credentials = parse_credentials(content["credentials_file"]) if self.credentials_file else ()
        return Presented(tls, credentials)


class ZooKeeperAccess:
    """What the connections of a store present, and the access list of the nodes that it creates."""

    def __init__(self, files: FollowedFiles[Presented] | None, new_nodes: NewNodes) -> None:
        self._files = files
        self.new_nodes = new_nodes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._files!r}, {self.new_nodes.value})"

    def with_new_nodes(self, new_nodes: NewNodes) -> "ZooKeeperAccess":
        """Return an access with the same files, and another access list of new nodes."""
        return ZooKeeperAccess(self._files, new_nodes)

    @property
    def uses_tls(self) -> bool:
        return self.presented.tls is not None

    @property
    def presented(self) -> Presented:
        """What the files contained when they were last read and usable."""
        return self._files.value if self._files is not None else Presented()

    @property
    def failure(self) -> str | None:
        """Why the files as they are now are not in use; None if they are."""
        return self._files.failure if self._files is not None else None

    def refresh(self) -> Presented:
        """Read the files again if they have changed. Blocks; for the thread of the connection."""
        if self._files is not None:
            self._files.poll()
        return self.presented

    def list_of_new_nodes(self, presented: Presented) -> AccessList:
        """Return the access list of nodes that are created with these credentials."""
        return list_of(self.new_nodes, presented.credentials)


def tls_reason(error: Exception) -> str:
    """Return why a TLS connection was refused, and what to check."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        return f"the server's certificate is refused: {reason}; check the server list and ca_file"
    if isinstance(error, TimeoutError):
        return "the server does not answer the TLS handshake; is it a secureClientPort?"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return f"the TLS handshake failed: {reason}; is it a secureClientPort, and does it require a client certificate?"


NO_ACCESS: Final = AccessFiles()
"""Neither TLS nor credentials; nodes are open."""
