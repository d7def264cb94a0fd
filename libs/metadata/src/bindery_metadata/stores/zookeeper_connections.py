"""Connections of kazoo's thread to ZooKeeper servers, and the way from that thread into the event loop.

kazoo's own TLS verifies no host names by default and loads the authorities of the operating system, so `Connections`
opens the sockets. Before each connection, the files of TLS and credentials are read again if they have changed.

kazoo tries the servers one after another, and loses its session unless one of them answers within the session timeout.
The TCP connection and the TLS handshake with one server therefore share one deadline:

    session timeout / number of servers

so that a server that accepts connections and stays silent leaves enough time for the others. Source: kazoo gives the
first request of a connection, which follows, the same share.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import Callback

from bindery_metadata.stores.access_lists import Credential
from bindery_metadata.stores.zookeeper_access import ZooKeeperAccess, tls_reason

_TIMEOUT_S_MIN: Final = 0.001
"""Minimum seconds of a step. A socket with a timeout of 0 would not block at all."""

_log = logging.getLogger(__name__)


class Crossing:
    """The only way from kazoo's thread into the event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[Callable[[], None]] = []

    def put(self, event: Callable[[], None]) -> None:
        """Call `event` in the loop after all earlier events. May be called on any thread; never blocks for long."""
        with self._lock:
            self._events.append(event)
            if len(self._events) > 1:
                return  # the scheduled drain processes this event too
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            try:
                event()
            except Exception:
                _log.exception("metadata_callback_failed")


class LoopHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threading handler with the event loop instead of two worker threads, which do not keep the order."""

    def __init__(
        self, crossing: Crossing, thread_ended: Callable[[], None], open_socket: Callable[..., socket.socket]
    ) -> None:
        super().__init__()
        self.callback_queue = self.completion_queue = crossing
        self._thread_ended = thread_ended
        self._open_socket = open_socket

    @property
    def running(self) -> bool:
        return True  # otherwise kazoo would call back on its current thread

    def start(self) -> None:
        """No-op: there are no workers."""

    def stop(self) -> None:
        """No-op: there are no workers."""

    def spawn(self, func: Callable[..., None], *args: Any, **kwargs: Any) -> threading.Thread:
        """Start kazoo's connection thread, and notify the loop when it has ended for any reason."""

        def run() -> None:
            try:
                func(*args, **kwargs)
            except Exception:
                _log.exception("kazoo_thread_failed")
            finally:
                self.callback_queue.put(self._thread_ended)

        thread = super().spawn(run)
        assert isinstance(thread, threading.Thread)
        return thread

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float | None = None, **_: Any
    ) -> socket.socket:
        """Connect to `address`, an IP address and a port, of the server that is configured as `hostname`.

        kazoo's options of TLS are ignored.
        """
        return self._open_socket(address, hostname or address[0], timeout)

    def select(self, readable: Any, writable: Any, failed: Any, timeout: float | None = None) -> Any:
        """Wait as `select.select` does. TLS sockets that hold decrypted bytes are readable at once.

        A TLS record may contain several responses. The operating system reports the socket once for all of them.
        """
        held = [one for one in readable if isinstance(one, ssl.SSLSocket) and one.pending()]
        found, *others = super().select(readable, writable, failed, 0 if held else timeout)
        return [*held, *(one for one in found if one not in held)], *others

    def dispatch_callback(self, callback: Callback) -> None:
        self.callback_queue.put(partial(callback.func, *callback.args))


class Connections:
    """Opens the sockets of a store, on kazoo's thread. `servers`: number of servers in its list. `present`: gets the
    credentials of the next connection."""

    def __init__(
        self, access: ZooKeeperAccess, *, servers: int, present: Callable[[Sequence[Credential]], None]
    ) -> None:
        self._access = access
        self._servers = servers
        self._present = present
        self._files_failure: str | None = None
        self.presented = access.presented
        """What the newest connection uses."""
        self.refusal: str | None = None
        """Why TLS refused the last connection; None if it did not."""

    def open(self, address: tuple[str, int], hostname: str, session_timeout_s: float | None) -> socket.socket:
        """Return a connection with the files as they are now, within a share of the session timeout; None: without a
        limit. Raises OSError."""
        deadline_s = None if session_timeout_s is None else time.monotonic() + session_timeout_s / self._servers
        self.presented = presented = self._access.refresh()
        self._report_files()
        self._present(presented.credentials)
        connection = socket.create_connection(address, _left_s(deadline_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if presented.tls is None:
            return connection
        connection.settimeout(_left_s(deadline_s))
        try:
            connection = presented.tls.wrap_socket(connection, server_hostname=hostname.removesuffix("."))
        except (OSError, ValueError) as error:  # SSLError is an OSError; ValueError: a name that TLS cannot express
            connection.close()
            self._refuse(f"{hostname}:{address[1]}: {tls_reason(error)}")
            raise ConnectionError(str(error)) from error
        self.refusal = None
        return connection

    def _refuse(self, reason: str) -> None:
        if reason != self.refusal:
            _log.warning("zookeeper_connection_refused", extra={"reason": reason})
        self.refusal = reason

    def _report_files(self) -> None:
        failure = self._access.failure
        if failure is not None and failure != self._files_failure:
            _log.error("zookeeper_files_not_usable", extra={"reason": f"{failure}; the last good files are in use"})
        self._files_failure = failure


def _left_s(deadline_s: float | None) -> float | None:
    """Return the seconds until the deadline; None: there is none."""
    return None if deadline_s is None else max(_TIMEOUT_S_MIN, deadline_s - time.monotonic())
