"""Connect commands to a cluster, name the operator, parse and print durations and times."""

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
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from bindery_core.errors import BadRequest

from bindery.common.options import LEDGERS_ROOT

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_metadata.layout.layout import LedgersLayout
    from bindery_metadata.stores.store import MetadataStore
    from bindery_metadata.stores.zookeeper import ZooKeeperStore

T = TypeVar("T")
WAITING_AFTER_S: Final = 2.0
"""Seconds after which a command reports that it still waits for ZooKeeper."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECONDS: Final = re.compile(r"@[0-9]{1,15}")
_DURATION: Final = re.compile(r"(?:\d+[dhms])+|\d+")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connection to the metadata of a cluster. `client` connects to bookies when it is first used."""

    store: "MetadataStore"
    layout: "LedgersLayout"
    client: "LedgerClient"


@asynccontextmanager
async def connected(zookeeper: str, ledgers_root: str = LEDGERS_ROOT) -> AsyncIterator[Cluster]:
    """Connect to the cluster whose metadata is in `zookeeper`, and disconnect at the end.

    BINDERY_CLIENT_... variables name the credentials for bookies (`bindery_client.connection.security`). Raises
    BadRequest if they are invalid, MetadataUnavailable if no server answers, NoSuchNode if there is no cluster.
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
            raise NoSuchNode(
                f"no cluster is initialized at {ledgers_root} in ZooKeeper {zookeeper}: run `bindery cluster init`"
            ) from None
        try:
            yield Cluster(store, layout, client)
        finally:
            await client.close()


@asynccontextmanager
async def connected_store(zookeeper: str) -> AsyncIterator["ZooKeeperStore"]:
    """Connect to ZooKeeper alone; a cluster need not exist in it. Configures the logs: stdout is for results.

    BINDERY_ZOOKEEPER_... variables name TLS files and credentials (`bindery_metadata.stores.zookeeper_access`). Raises
    BadRequest if they are invalid.
    """
    import asyncio

    from bindery_kit.observability import logs
    from bindery_metadata.stores.zookeeper import CONNECT_TIMEOUT_S, ZooKeeperStore
    from bindery_metadata.stores.zookeeper_access import AccessFiles

    access = AccessFiles.of(os.environ).load()
    logs.configure(service="cli", level="warning")
    waiting = f"waiting for ZooKeeper at {zookeeper} (timeout: {CONNECT_TIMEOUT_S:.0f} s)"
    notice = asyncio.get_running_loop().call_later(
        WAITING_AFTER_S, partial(print, waiting, file=sys.stderr, flush=True)
    )
    try:
        store = await ZooKeeperStore.connect(zookeeper, access=access)
    finally:
        notice.cancel()
    try:
        yield store
    finally:
        await store.close()


async def create_chroot(zookeeper: str) -> str:
    """Create the chroot that `zookeeper` names. Return its path; empty: there is none, or it existed.

    Raises the errors of `connected_store`, and Unauthorized.
    """
    from bindery_metadata.stores.zookeeper import make_chroot
    from bindery_metadata.stores.zookeeper_access import AccessFiles
    from bindery_metadata.stores.zookeeper_servers import ZooKeeperServers

    is_new = await make_chroot(zookeeper, access=AccessFiles.of(os.environ).load())
    return ZooKeeperServers.parse(zookeeper).chroot if is_new else ""


def run_on(zookeeper: str, ledgers_root: str, work: "Callable[[Cluster], Awaitable[T]]") -> T:
    """Run `work` on the cluster and return its result."""
    import asyncio

    async def main() -> T:
        async with connected(zookeeper, ledgers_root) as cluster:
            return await work(cluster)

    return asyncio.run(main())


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def operator_name() -> str:
    """Return user@host, which histories and membership records contain."""
    user = "unknown"
    with suppress(OSError, KeyError, ImportError):  # a container without that user
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def parse_duration(text: str) -> float:
    """Return the seconds that `90`, `90s`, `10m`, `1h30m` or `2d` means. Raises BadRequest."""
    if not _DURATION.fullmatch(text):
        raise BadRequest("not a duration; the format is 90s, 10m, 1h30m or 2d", given=text)
    if text.isdecimal():
        return float(text)
    return float(sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text)))


def parse_time(text: str) -> int:
    """Return the milliseconds since 1970 that a time with its zone means: `2026-12-01T08:00:00Z` or `...+01:00`.

    Raises BadRequest, also for a time before 1970.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or found < _EPOCH:
        raise BadRequest("not a time with its zone; the format is 2026-12-01T08:00:00Z", given=text)
    return (found - _EPOCH) // timedelta(milliseconds=1)


def parse_moment(text: str, *, now_ms: int) -> int:
    """Return the milliseconds since 1970 of a time, of `@MS`, or of the time `90s`, `5m`, `1h30m` or `2d` ago.

    Raises BadRequest. A number needs a unit or an `@`.
    """
    if _MILLISECONDS.fullmatch(text):
        return int(text[1:])
    if _DURATION.fullmatch(text) and not text.isdecimal():
        return max(0, now_ms - round(parse_duration(text) * 1_000))
    try:
        return parse_time(text)
    except BadRequest:
        raise BadRequest("not a time; the formats are 5m (ago), 2026-12-01T08:00:00Z and @MS", given=text) from None


def duration_text(seconds: float) -> str:
    """Return a duration in the form `45 s`, `3 min`, `2.5 h` or `4 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} d"


def time_text(at_ms: int) -> str:
    """Return a time in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000))
