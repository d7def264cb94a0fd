"""PeerLinks: the connections of this process to others of its kind, at most a few to each.

| what                                           | limit                                                            |
|------------------------------------------------|------------------------------------------------------------------|
| connections to one process                     | `links_max`; another one opens when each has SPREAD_AT requests  |
| requests in progress of one connection         | STREAMS_MAX; TooBusy above it                                    |
| bytes of unread responses over all connections | `unread_size_max`; above it, the one unread for longest is ended |

A process that refuses the upgrade, such as one of an earlier version, is asked again after FALLBACK_S; until then,
`begin` raises NotMultiplexed at once, and the caller sends its request over HTTP/1.1.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.multiplex.frames import TOKEN
from bindery_kit.multiplex.heads import Headers
from bindery_kit.multiplex.link import Link, NotBegun, NotMultiplexed, PeerRequest

CONNECT_TIMEOUT_S: Final = 5.0
"""Maximum seconds until a connection has its answer to the upgrade."""
SPREAD_AT: Final = 256
"""Number of requests in progress on each connection at which another one opens."""
STREAMS_MAX: Final = 4_096
"""Maximum number of requests in progress of one connection."""
FALLBACK_S: Final = 60.0
"""Seconds for which a process that refused the upgrade is not asked again."""
BRIEF_FALLBACK_S: Final = 2.0
"""The same after a refusal that may soon end: the process starts, or has too many connections."""
REMEMBERED_MAX: Final = 1_000
"""Number of processes above which those are forgotten to which there is no connection."""
_SOON: Final = frozenset((0, 408, 429, 503))
"""Statuses of such refusals. 0: no answer of HTTP/1.1."""

log = logging.getLogger(__name__)


class Unreachable(NotBegun):
    """There is no connection: nothing was sent. `__cause__` is the error of the system or of TLS."""


class _Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class _Peer:
    """What is known of one process."""

    __slots__ = ("connecting", "fallback_until_s", "links", "status")

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.connecting: asyncio.Task[Link] | None = None
        self.fallback_until_s = 0.0
        self.status = 0
        """Status of the last refusal."""


class PeerLinks:
    """`path`: that of the upgrade. `headers`: returns the headers that authenticate this process. `tls`: of connections
    to https URLs; None: the defaults of Python. `now`: monotonic seconds."""

    def __init__(
        self,
        *,
        path: str,
        headers: Callable[[], Headers],
        tls: ssl.SSLContext | None,
        links_max: int,
        unread_size_max: int,
        now: Callable[[], float],
    ) -> None:
        assert links_max >= 1
        self._path = path
        self._headers = headers
        self._tls = tls
        self._links_max = links_max
        self._now = now
        self._peers: dict[_Origin, _Peer] = {}
        self._is_closed = False
        self.held = HeldBytes("peer_responses", unread_size_max)

    @property
    def links(self) -> list[Link]:
        """All connections."""
        return [link for peer in self._peers.values() for link in peer.links]

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return sum(len(link.requests) for link in self.links)

    async def begin(self, url: str, head: bytes, *, has_body: bool) -> PeerRequest:
        """Send the head of a request to the process at `url`, `http://host:port`.

        Raises NotMultiplexed if that process serves HTTP/1.1 only, Unreachable or NotBegun; nothing was sent then.
        """
        origin = _origin(url)
        peer = self._peers.get(origin)
        if peer is None:
            if len(self._peers) >= REMEMBERED_MAX:
                for known, one in list(self._peers.items()):
                    self._clean(known, one)
            peer = self._peers[origin] = _Peer()
        link = self._best(peer)
        if link is None:
            link = await self._another(origin, peer)
        elif len(link.requests) >= SPREAD_AT and len(peer.links) < self._links_max and peer.connecting is None:
            self._connect(origin, peer)  # for later requests; this one does not wait
        return link.begin(head, has_body=has_body)

    def _best(self, peer: _Peer) -> Link | None:
        """Return the usable connection with the fewest requests; None: there is none."""
        best: Link | None = None
        for link in peer.links:
            if link.is_usable and (best is None or len(link.requests) < len(best.requests)):
                best = link
        return best

    async def _another(self, origin: _Origin, peer: _Peer) -> Link:
        """Open a connection, together with the other requests that wait for it."""
        if peer.fallback_until_s > self._now():
            raise NotMultiplexed(peer.status)
        if self._is_closed:
            raise Unreachable("this process is stopping")
        task = peer.connecting or self._connect(origin, peer)
        return await asyncio.shield(task)

    def _connect(self, origin: _Origin, peer: _Peer) -> "asyncio.Task[Link]":
        task = peer.connecting = asyncio.create_task(self._open(origin, peer), name=f"peer:{origin.host}:{origin.port}")
        task.add_done_callback(lambda done: self._connected(origin, peer, done))
        return task

    def _connected(self, origin: _Origin, peer: _Peer, task: "asyncio.Task[Link]") -> None:
        peer.connecting = None
        error = None if task.cancelled() else task.exception()  # taken, also if nobody waits any more
        if isinstance(error, NotMultiplexed):
            peer.status = error.status
            brief = error.status in _SOON or error.status >= 500
            peer.fallback_until_s = self._now() + (BRIEF_FALLBACK_S if brief else FALLBACK_S)
            log.info("a peer serves HTTP/1.1 only: %s:%d answers %d", origin.host, origin.port, error.status)
        elif error is not None:
            self._clean(origin, peer)

    async def _open(self, origin: _Origin, peer: _Peer) -> Link:
        """Return a connection on which requests may begin. Raises NotMultiplexed, Unreachable."""
        loop = asyncio.get_running_loop()
        tls = (self._tls or ssl.create_default_context()) if origin.scheme == "https" else None
        upgrade = self._upgrade(origin)

        def closed(link: Link) -> None:
            if link in peer.links:
                peer.links.remove(link)
            self._clean(origin, peer)

        def create() -> Link:
            return Link(upgrade, held=self.held, streams_max=STREAMS_MAX, on_closed=closed)

        link: Link | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, link = await loop.create_connection(
                    create,
                    origin.host,
                    origin.port,
                    ssl=tls,
                    server_hostname=origin.host if tls is not None else None,
                )
                await link.opened
        except (OSError, TimeoutError, NotBegun) as error:
            if link is not None:
                link.close()
            raise Unreachable(f"there is no connection to {origin.host}:{origin.port}") from error
        except BaseException:
            if link is not None:
                link.close()
            raise
        if not link.is_usable:
            raise Unreachable(f"{origin.host}:{origin.port} ended the connection at once")
        peer.links.append(link)
        peer.fallback_until_s = 0.0
        return link

    def _upgrade(self, origin: _Origin) -> bytes:
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        lines = [
            f"GET {self._path} HTTP/1.1".encode(),
            f"host: {host}:{origin.port}".encode(),
            b"connection: upgrade",
            b"upgrade: " + TOKEN,
            *(b"%b: %b" % header for header in self._headers()),
        ]
        return b"\r\n".join((*lines, b"", b""))

    def _clean(self, origin: _Origin, peer: _Peer) -> None:
        """Forget a process to which there is nothing, so that addresses of former ones take no memory."""
        is_needed = peer.links or peer.connecting is not None or peer.fallback_until_s > self._now()
        if not is_needed and self._peers.get(origin) is peer:
            del self._peers[origin]

    async def close(self) -> None:
        """Close all connections. Requests in progress fail."""
        self._is_closed = True
        for peer in list(self._peers.values()):
            if peer.connecting is not None:
                peer.connecting.cancel()
            for link in list(peer.links):
                link.close()
        await asyncio.sleep(0)


def _origin(url: str) -> _Origin:
    parts = urlsplit(url)
    scheme = parts.scheme or "http"
    return _Origin(scheme, parts.hostname or "", parts.port or (443 if scheme == "https" else 80))
