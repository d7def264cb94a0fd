"""What the operator's verbs share: options, the connection to a cluster, who asks, durations, live progress."""

import getpass
import os
import random
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from bindery_core.errors import BadRequest

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_metadata.layout.layout import LedgersLayout
    from bindery_metadata.stores.store import MetadataStore

T = TypeVar("T")
LINE_INTERVAL_S: Final = 5.0
"""Where stderr is no terminal, progress is a line of its own, this often at most."""

ZooKeeper = Annotated[
    str,
    typer.Option(
        "--zookeeper", metavar="HOST:PORT", envvar="BINDERY_ZOOKEEPER", help="ZooKeeper servers, comma-separated."
    ),
]
LedgersRoot = Annotated[str, typer.Option("--ledgers-root", metavar="PATH", help="The cluster's root znode.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the others to read.")]
LEDGERS_ROOT: Final = "/ledgers"

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(?:\d+[dhms])+|\d+")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connection to a cluster's metadata; `client` connects to bookies when it is used."""

    store: "MetadataStore"
    layout: "LedgersLayout"
    client: "LedgerClient"


@asynccontextmanager
async def connected(zookeeper: str, ledgers_root: str) -> AsyncIterator[Cluster]:
    """Raises MetadataUnavailable when no server answers, NoSuchNode when there is no cluster.

    BINDERY_CLIENT_... variables name the credentials for bookies
    (`bindery_client.connection.security`). Raises BadRequest if they are invalid.
    """
    from bindery_client.client import LedgerClient
    from bindery_client.connection.security import SecurityFiles
    from bindery_core.errors import NoSuchNode
    from bindery_metadata.layout.layout import LedgersLayout

    security = SecurityFiles.of({}, os.environ).load()
    async with connected_store(zookeeper) as store:
        layout = LedgersLayout(ledgers_root)
        try:
            client = await LedgerClient.connect(
                store, randomness=random.SystemRandom(), layout=layout, security=security
            )
        except NoSuchNode:
            raise NoSuchNode(f"there is no cluster at {ledgers_root} of {zookeeper}: `bindery cluster init`") from None
        try:
            yield Cluster(store, layout, client)
        finally:
            await client.close()


@asynccontextmanager
async def connected_store(zookeeper: str) -> AsyncIterator["MetadataStore"]:
    """Metadata alone, without a cluster in it."""
    from bindery_kit.observability import logs
    from bindery_metadata.stores.zookeeper import ZooKeeperStore

    logs.configure(service="cli", level="warning")
    store = await ZooKeeperStore.connect(zookeeper)
    try:
        yield store
    finally:
        await store.close()


def run_on(zookeeper: str, ledgers_root: str, work: "Callable[[Cluster], Awaitable[T]]") -> T:
    """Run `work` on the cluster."""

    import asyncio

    async def main() -> T:
        async with connected(zookeeper, ledgers_root) as cluster:
            return await work(cluster)

    return asyncio.run(main())


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def operator_name() -> str:
    """user@host, for histories and reasons."""
    user = "unknown"
    with suppress(OSError, KeyError, ImportError):  # a container without that user
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def parse_duration(text: str) -> float:
    """`90`, `90s`, `10m`, `1h30m`, `2d` in seconds. Raises BadRequest."""
    if not _DURATION.fullmatch(text):
        raise BadRequest("not a duration; write 90s, 10m, 1h30m or 2d", given=text)
    if text.isdecimal():
        return float(text)
    return float(sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text)))


def duration_text(seconds: float) -> str:
    """`45 s`, `3 min`, `2.5 h`, `4 d` for people."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} d"


def time_text(at_ms: int) -> str:
    """UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000))


class Live:
    """One line on stderr that is written over: where stderr is no terminal, a new line now and then.

    `is_quiet`: nothing at all, as with --json.
    """

    def __init__(self, *, is_quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_quiet = is_quiet
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._size = 0
        self._last = ""
        self._said_at = clock()  # short work says nothing

    def show(self, line: str) -> None:
        if self._is_quiet or line == self._last:
            return
        if self._is_terminal:
            print("\r" + line.ljust(self._size), end="", file=sys.stderr, flush=True)
            self._size = len(line)
        elif self._clock() - self._said_at >= LINE_INTERVAL_S:
            print(line, file=sys.stderr, flush=True)
            self._said_at = self._clock()
        self._last = line

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._is_quiet:
            self.clear()
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._size:
            print("\r" + " " * self._size + "\r", end="", file=sys.stderr, flush=True)
            self._size = 0
            self._last = ""
