"""Parse the addresses of a ZooKeeper: `host:port,host:port`, and after the last server optionally a chroot, `/path`.

A chroot is the node that is the root of everything that a client sees: with `zk-0:2181,zk-1:2181/messaging`, the node
`/ledgers` of a cluster is `/messaging/ledgers` on the servers. Several clusters, and other programs, can so share one
ZooKeeper. ZooKeeper creates no chroot by itself: `bindery cluster init` and `bindery cluster restore` do.

Importing this module is cheap, because the start of a bookie needs it.
Source: ZooKeeper's ConnectStringParser, which Apache's clients use; `/` alone is no chroot there either.
"""

from dataclasses import dataclass

from bindery_core.errors import BadRequest

from bindery_metadata.layout.znode_path import validate_path


@dataclass(frozen=True, slots=True)
class ZooKeeperServers:
    """The servers of a ZooKeeper, and a node of it that is used as the root."""

    servers: tuple[str, ...]
    """Addresses as `host:port`."""
    chroot: str = ""
    """Path of that node; empty: the root of ZooKeeper."""

    @classmethod
    def parse(cls, text: str) -> "ZooKeeperServers":
        """Raises BadRequest unless `text` has the form "host:port,host:port" or "host:port,host:port/path"."""
        listed, slash, path = text.partition("/")
        servers = tuple(server.strip() for server in listed.split(","))
        for server in servers:
            host, colon, port = server.rpartition(":")
            if not (_is_host(host) and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise BadRequest("not a list of zookeeper servers (host:port,host:port[/chroot])", hosts=text)
        return cls(servers, _chroot(path.strip(), text) if slash else "")

    @property
    def above(self) -> str:
        """The same servers without the chroot."""
        return ",".join(self.servers)

    def __str__(self) -> str:
        return self.above + self.chroot


def _chroot(path: str, text: str) -> str:
    if not path:
        return ""
    if "," in path or ":" in path:
        raise BadRequest(
            "the chroot of zookeeper is written once, after the last server (host:port,host:port/chroot)", hosts=text
        )
    if path == "zookeeper" or path.startswith("zookeeper/"):
        raise BadRequest("the chroot cannot be /zookeeper, where zookeeper keeps its own nodes", hosts=text)
    return validate_path(f"/{path.removesuffix('/')}")


def _is_host(name: str) -> bool:
    """Return whether `name` is a valid host name: no part is empty or longer than 63 characters."""
    return all(0 < len(part) < 64 for part in name.removesuffix(".").split("."))
