"""Options of `bindery standalone`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bindery_core.errors import BadRequest

PROCESSES_MAX: Final = 64
"""Maximum number of processes of each kind; a larger number is probably a typing error."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `bindery standalone`. Raises BadRequest if they are out of range or contradict each other."""

    data: Path = Path("data")
    bookies: int = 4
    brokers: int = 1
    auditors: int = 1
    zookeepers: int = 1
    port_offset: int = 0
    zookeeper: str | None = None
    """host:port of an existing ZooKeeper. None: run the servers."""
    secure: bool = False
    """TLS, authentication and authorization on all ports."""

    def __post_init__(self) -> None:
        for name, count, least in (
            ("bookies", self.bookies, 0),
            ("brokers", self.brokers, 0),
            ("auditors", self.auditors, 0),
            ("zookeepers", self.zookeepers, 1),
        ):
            if not least <= count <= PROCESSES_MAX:
                raise BadRequest(f"--{name} must be {least} to {PROCESSES_MAX}", given=count)
        if self.secure and self.zookeepers > 1:
            raise BadRequest(
                "--secure runs one ZooKeeper server, because the connections between several are not encrypted; leave "
                "out --zookeepers, or name a secured ZooKeeper with --zookeeper"
            )
        if self.brokers and not self.bookies and self.zookeeper is None:
            raise BadRequest("--bookies 0 leaves the brokers without storage; run bookies, or pass --brokers 0 too")
