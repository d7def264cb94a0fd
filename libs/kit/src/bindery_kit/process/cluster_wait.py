"""ClusterWait: wait for ZooKeeper and for an initialized cluster at the start of a service, and report the wait.

    ZooKeeper answers --> its cluster is initialized (`bindery cluster init`) --> the start continues

During a wait, /startupz and /readyz show what the service waits for, since when, the cause, and the fix. A log line
repeats this every REPORT_INTERVAL_S. If both waits together exceed `timeout_s`, the start fails with an error that
names the same cause and fix.

Later requests of a start use `retry_while_unavailable`, because a restart of ZooKeeper must not make the start fail.

kazoo does not report why it cannot connect, so this module connects to the servers itself to find it, with TLS if the
service uses it. Importing this module is cheap, because the start of a bookie needs it.
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from bindery_core.errors import BadRequest, MetadataOutcomeUnknown, MetadataUnavailable, NotThere, TryAgain
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.zookeeper_access import ConnectionRefused, ZooKeeperAccess, tls_reason

from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger

FIRST_REPORT_S: Final = 1.0
"""Time in seconds from the beginning of the wait to the first report; shorter waits are not logged."""
REPORT_INTERVAL_S: Final = 10.0
"""Interval in seconds between two reports."""
POLL_S: Final = 0.5
"""Interval in seconds between two checks whether the cluster is initialized."""
RETRY_S: Final = 1.0
"""Delay in seconds before `retry_while_unavailable` repeats a failed call."""
PROBE_TIMEOUT_S: Final = 3.0
"""Timeout in seconds of one connection attempt to one server."""
PROBE_SILENCE_S: Final = 1.0
"""Seconds without an end of the connection after which the server has accepted this client. With TLS 1.3, a server
refuses the certificate of a client, or its absence, only after the client's handshake."""
CLOSE_TIMEOUT_S: Final = 2.0
"""Time limit in seconds for the close of a failed client. Without a limit, a name server that does not answer would
block the close for a minute."""
FOREVER_S: Final = 10 * 365 * 86400.0
"""Limit in seconds that is used for "no limit": ten years."""

T = TypeVar("T")

log = get_logger(__name__)


class ClusterNotInitialized(NotThere):
    """ZooKeeper answers, but contains no cluster."""

    code = "cluster_not_initialised"


class ClusterWait:
    """Wait for the cluster during the start of one service: call `for_zookeeper` first, then `for_cluster`."""

    def __init__(
        self,
        zookeeper: str,
        layout: LedgersLayout,
        *,
        setting: str,
        health: Health,
        timeout_s: float,
        wall_clock_ms: Callable[[], int],
        access: Callable[[], ZooKeeperAccess] | None = None,
    ) -> None:
        """Set the limits and names of the wait.

        `setting`: the environment variable that sets `zookeeper`, for messages. `timeout_s`: time limit in seconds of
        both waits together; 0: no limit. `access`: reads the TLS files of the connections, to find why TLS refuses
        them; None: no TLS.
        """
        self._zookeeper = zookeeper
        self._layout = layout
        self._setting = setting
        self._health = health
        self._timeout_s = timeout_s
        self._wall_clock_ms = wall_clock_ms
        self._access = access
        self._began_s: float | None = None
        self._since = ""

    @property
    def limit_s(self) -> float:
        """Maximum seconds of both waits together."""
        return limit_s(self._timeout_s)

    async def for_zookeeper(self, connecting: Awaitable[T]) -> T:
        """Return the result of `connecting`, which has a timeout of `limit_s` itself.

        Raises MetadataUnavailable and the errors of `connecting`.
        """
        self._begin()
        self._health.progress(f"connecting to ZooKeeper at {self._zookeeper}")
        reporting = asyncio.ensure_future(self._report_zookeeper())
        try:
            async with asyncio.timeout(self.limit_s + CLOSE_TIMEOUT_S):
                return await connecting
        except (MetadataUnavailable, TimeoutError) as error:
            reporting.cancel()
            reason = str(error) if isinstance(error, ConnectionRefused) else await self._zookeeper_reason()
            sentence = f"gave up waiting for ZooKeeper after {self._timeout_s:g} s: {reason}"
            raise MetadataUnavailable(sentence) from error
        finally:
            reporting.cancel()

    async def for_cluster(self, store: MetadataStore) -> None:
        """Wait until the cluster is initialized. Raises ClusterNotInitialized, MetadataUnavailable."""
        self._begin()
        reported_s: float | None = None
        while True:
            error: Exception | None = None
            try:
                if await store.exists(self._layout.instance_id) is not None:  # `cluster init` creates it last
                    return
                reason = self._cluster_reason()
            except TryAgain as unavailable:
                error, reason = unavailable, f"{unavailable}; is ZooKeeper at {self._zookeeper} healthy?"
            left_s = self._left_s()
            if left_s <= 0:
                kind = MetadataUnavailable if error else ClusterNotInitialized
                raise kind(f"gave up waiting for the cluster after {self._timeout_s:g} s: {reason}") from error
            self._health.progress(f"waiting for the cluster since {self._since}: {reason}")
            now_s = asyncio.get_running_loop().time()
            if reported_s is None or now_s - reported_s >= REPORT_INTERVAL_S:
                reported_s = now_s
                log.warning("cluster_not_initialised", **self._facts(reason))
            await asyncio.sleep(min(POLL_S, left_s))

    # --- ZooKeeper ------------------------------------------------------------------------------------------------

    async def _report_zookeeper(self) -> None:
        await asyncio.sleep(FIRST_REPORT_S)
        while True:
            reason = await self._zookeeper_reason()
            self._health.progress(f"waiting for ZooKeeper since {self._since}: {reason}")
            log.warning("zookeeper_not_reached", **self._facts(reason))
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _zookeeper_reason(self) -> str:
        """Return "cause; fix" of the wait for ZooKeeper."""
        listed, _, _chroot = self._zookeeper.partition("/")
        servers = [server.strip() for server in listed.split(",")]
        try:
            tls = None if self._access is None else (await asyncio.to_thread(self._access)).presented.tls
        except BadRequest as error:
            return str(error)
        causes = await asyncio.gather(*(_probe(server, tls) for server in servers))
        reason = ", ".join(cause.text for cause in causes)
        if any(cause.is_tls for cause in causes):
            return f"{reason}; correct zookeeper_access, or set {self._setting} to the servers' ports for TLS"
        return f"{reason}; start ZooKeeper, or set {self._setting} to its servers"

    def _cluster_reason(self) -> str:
        return (
            f"ZooKeeper at {self._zookeeper} has no cluster at {self._layout.root}; "
            f"`bindery cluster init --zookeeper {self._zookeeper}` creates one"
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


async def retry_while_unavailable(call: Callable[[], Awaitable[T]], *, event: str) -> T:
    """Return the result of `call`; repeat the call while ZooKeeper does not answer.

    `call` must be idempotent, because a failed call may have taken effect. `event`: the log event of each failed call.
    """
    while True:
        try:
            return await call()
        except (MetadataUnavailable, MetadataOutcomeUnknown) as error:
            log.warning(event, **error_fields(error))
        await asyncio.sleep(RETRY_S)


def limit_s(timeout_s: float) -> float:
    """Return the time limit in seconds for the value of a timeout setting. 0: no limit, which is FOREVER_S."""
    return timeout_s or FOREVER_S


class _Cause(NamedTuple):
    """Why there is no session with a server. `is_tls`: TLS refused the connection."""

    text: str
    is_tls: bool = False


async def _probe(server: str, tls: ssl.SSLContext | None) -> _Cause:
    """Return the probable cause of the missing session with the server `host:port`."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (socket.gaierror, UnicodeError):  # UnicodeError: a part of the name is empty or too long
        return _Cause(f"the name {host} does not resolve")
    except TimeoutError:
        return _Cause(f"{server} does not answer")
    except OSError as error:
        return _Cause(f"{server}: {os.strerror(error.errno).lower() if error.errno else error}")
    writer.transport.abort()
    refusal = None if tls is None else await _tls_refusal(host, int(port), tls)
    if refusal is not None:
        return _Cause(f"{server}: {refusal}", is_tls=True)
    return _Cause(f"{server} accepts connections but opens no session (does it have a quorum?)")


async def _tls_refusal(host: str, port: int, tls: ssl.SSLContext) -> str | None:
    """Return why TLS fails with a server that accepts connections, and what to check; None: it does not fail."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=tls, server_hostname=host.removesuffix("."), ssl_handshake_timeout=2 * PROBE_TIMEOUT_S
            )
    except (OSError, ValueError) as error:  # SSLError and TimeoutError are OSErrors; ValueError: not a name for TLS
        return tls_reason(error)
    try:
        async with asyncio.timeout(PROBE_SILENCE_S):
            await reader.read(1)
    except TimeoutError:
        return None
    except OSError as error:
        return tls_reason(error)
    finally:
        writer.transport.abort()
    return "the server ends the connection after the TLS handshake; does it require a client certificate?"
