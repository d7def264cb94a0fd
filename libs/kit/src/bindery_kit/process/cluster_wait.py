"""ClusterWait: what every service waits for at its start, and says that it does.

    ZooKeeper answers --> the cluster in it is initialised (`bindery cluster init` did that) --> the start goes on

While it waits, /startupz and /readyz say for what, since when, why, and what ends it; the log says so at the beginning
and every TELL_INTERVAL_S. After `timeout_s` both waits together are given up, with the same cause and fix.

What a start asks afterwards goes through `asked_again`: a ZooKeeper that is being restarted too is no reason to end.

The cause is found out by a look of our own at the servers: kazoo tells none.
Importing this module is cheap, as a bookie's start wants it.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable, NotThere, TryAgain
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger

FIRST_TOLD_S: Final = 1.0
"""A wait that is shorter is not worth a line."""
TELL_INTERVAL_S: Final = 10.0
POLL_S: Final = 0.5
RETRY_S: Final = 1.0
LOOK_TIMEOUT_S: Final = 3.0
"""Of one look at one server."""
CLOSE_TIMEOUT_S: Final = 2.0
"""Longest that a client that gives up may take to close: a name server that is silent would hold it for a minute."""
FOREVER_S: Final = 10 * 365 * 86400.0

T = TypeVar("T")

log = get_logger(__name__)


class ClusterNotInitialised(NotThere):
    """ZooKeeper answers, and holds no cluster."""

    code = "cluster_not_initialised"


class ClusterWait:
    """One start's. `for_zookeeper` first, then `for_cluster`."""

    def __init__(
        self,
        zookeeper: str,
        layout: LedgersLayout,
        *,
        setting: str,
        health: Health,
        timeout_s: float,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        """`setting`: the environment's name of `zookeeper`, for the fix. `timeout_s`: of all of it; 0: for ever."""
        self._zookeeper = zookeeper
        self._layout = layout
        self._setting = setting
        self._health = health
        self._timeout_s = timeout_s
        self._wall_clock_ms = wall_clock_ms
        self._began_s: float | None = None
        self._since = ""

    @property
    def limit_s(self) -> float:
        """Seconds that both waits together may take."""
        return limit_s(self._timeout_s)

    async def for_zookeeper(self, connecting: Awaitable[T]) -> T:
        """What `connecting` gives, which minds `limit_s` itself. Raises MetadataUnavailable, or what it raises."""
        self._begin()
        self._health.progress(f"connecting to ZooKeeper at {self._zookeeper}")
        telling = asyncio.ensure_future(self._tell_of_zookeeper())
        try:
            async with asyncio.timeout(self.limit_s + CLOSE_TIMEOUT_S):
                return await connecting
        except (MetadataUnavailable, TimeoutError) as error:
            telling.cancel()
            sentence = f"gave up waiting for ZooKeeper after {self._timeout_s:g} s: {await self._zookeeper_reason()}"
            raise MetadataUnavailable(sentence) from error
        finally:
            telling.cancel()

    async def for_cluster(self, store: MetadataStore) -> None:
        """Raises ClusterNotInitialised, MetadataUnavailable."""
        self._begin()
        told_s: float | None = None
        while True:
            error: Exception | None = None
            try:
                if await store.exists(self._layout.instance_id) is not None:  # what `cluster init` makes last
                    return
                reason = self._cluster_reason()
            except TryAgain as unavailable:
                error, reason = unavailable, f"{unavailable}; is ZooKeeper at {self._zookeeper} well?"
            left_s = self._left_s()
            if left_s <= 0:
                kind = MetadataUnavailable if error else ClusterNotInitialised
                raise kind(f"gave up waiting for the cluster after {self._timeout_s:g} s: {reason}") from error
            self._health.progress(f"waiting for the cluster since {self._since}: {reason}")
            now_s = asyncio.get_running_loop().time()
            if told_s is None or now_s - told_s >= TELL_INTERVAL_S:
                told_s = now_s
                log.warning("cluster_not_initialised", **self._facts(reason))
            await asyncio.sleep(min(POLL_S, left_s))

    # --- ZooKeeper ------------------------------------------------------------------------------------------------

    async def _tell_of_zookeeper(self) -> None:
        await asyncio.sleep(FIRST_TOLD_S)
        while True:
            reason = await self._zookeeper_reason()
            self._health.progress(f"waiting for ZooKeeper since {self._since}: {reason}")
            log.warning("zookeeper_not_reached", **self._facts(reason))
            await asyncio.sleep(TELL_INTERVAL_S)

    async def _zookeeper_reason(self) -> str:
        """`cause; fix`."""
        servers = [server.strip() for server in self._zookeeper.split(",")]
        causes = await asyncio.gather(*(_look(server) for server in servers))
        return f"{', '.join(causes)}; start ZooKeeper, or name its servers in {self._setting}"

    def _cluster_reason(self) -> str:
        return (
            f"ZooKeeper at {self._zookeeper} has no cluster at {self._layout.root}; "
            f"`bindery cluster init --zookeeper {self._zookeeper}` makes one"
        )

    # --- time -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._began_s is None:
            self._began_s = asyncio.get_running_loop().time()
            self._since = time.strftime("%H:%M:%S UTC", time.gmtime(self._wall_clock_ms() / 1000))

    def _waited_s(self) -> float:
        assert self._began_s is not None
        return asyncio.get_running_loop().time() - self._began_s

    def _left_s(self) -> float:
        return max(0.0, self.limit_s - self._waited_s())

    def _facts(self, reason: str) -> dict[str, object]:
        gives_up = {"gives_up_in_s": round(self._left_s(), 1)} if self._timeout_s else {}
        return {"reason": reason, "since": self._since, "waited_s": round(self._waited_s(), 1), **gives_up}


async def asked_again(ask: Callable[[], Awaitable[T]], *, event: str) -> T:
    """What `ask` gives, or raises; asked anew while ZooKeeper does not answer, so it must not matter whether an earlier
    one arrived. `event`: of the log's line about each that failed."""
    while True:
        try:
            return await ask()
        except (MetadataUnavailable, MetadataOutcomeUnknown) as error:
            log.warning(event, **error_fields(error))
        await asyncio.sleep(RETRY_S)


def limit_s(timeout_s: float) -> float:
    """The seconds that a setting of a wait means: 0 is for ever."""
    return timeout_s or FOREVER_S


async def _look(server: str) -> str:
    """Why there may be no session with `host:port`."""
    host, _, port = server.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (socket.gaierror, UnicodeError):  # an empty part of a name, or one that is too long, is refused unasked
        return f"the name {host} does not resolve"
    except TimeoutError:
        return f"{server} does not answer"
    except OSError as error:
        return f"{server}: {os.strerror(error.errno).lower() if error.errno else error}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return f"{server} takes connections but gives no session (has it a quorum?)"
