"""NetworkInMemory: connections of an event loop to bookies that exist only as transports of the test."""

import asyncio
from collections.abc import Callable
from typing import Any


class WireInMemory(asyncio.Transport):
    """The transport of one connection: records what is written; the test is the peer."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.aborted, "nothing is written after the end"
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        if not self.aborted:
            self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """End the connection; None: in an orderly way."""
        self.aborted = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def receive(self, data: bytes) -> None:
        """The client receives this."""
        self.protocol.data_received(data)


class NetworkInMemory:
    """Replaces the connections of the running loop."""

    def __init__(self) -> None:
        self.attempts: list[tuple[str, int]] = []
        self.wires: list[WireInMemory] = []
        self.refusal: Exception | None = None
        """Raised by attempts to connect."""
        self.reachable = asyncio.Event()
        """While it is not set, attempts to connect wait."""
        self.reachable.set()
        asyncio.get_running_loop().create_connection = self._create_connection  # type: ignore[assignment,method-assign]

    async def _create_connection(
        self, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[WireInMemory, asyncio.Protocol]:
        self.attempts.append((host, port))
        await self.reachable.wait()
        if self.refusal is not None:
            raise self.refusal
        wire = WireInMemory(factory())
        self.wires.append(wire)
        wire.protocol.connection_made(wire)
        return wire, wire.protocol
