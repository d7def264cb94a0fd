"""Hostile clients of a bookie's ledger port.

    python -m bindery_e2e.attacks.ledger_attacks unfinished --port 3181 --clients 2000 --seconds 5

They run in a process of their own, so that they do not delay the clients that a test measures, come from ADDRESSES, and
connect again when they are disconnected. At the end, a line of JSON has the number of connections and of their ends.

| attack     | each client                                                                                   |
|------------|-----------------------------------------------------------------------------------------------|
| silent     | connects, and sends nothing                                                                   |
| unfinished | sends all bytes of the largest frame but the last one                                         |
| slow       | sends a frame byte by byte                                                                    |
| unread     | requests the entries of LEDGER_ID, and reads no response                                      |
| readers    | requests the entries of LEDGER_ID, and reads them as fast as they come                        |
| garbage    | sends random bytes, wrong lengths, or the largest length in front of nothing                  |
| operations | sends as many requests other than adds and reads as the bookie takes, and reads no response   |
| polls      | sends long polls, which wait for an entry that nobody adds                                    |
| handshakes | requests TLS, and does not begin the handshake                                                |
| drains     | requests TLS, and sends a part of a frame in clear                                            |
| secured    | completes the handshake, adds an entry of SECURED_SIZE bytes, and then sends nothing          |
"""

import argparse
import asyncio
import contextlib
import functools
import json
import random
import resource
import select
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v3
from bindery_core.wire.framing import FRAME_SIZE_MAX
from bindery_core.wire.messages import ReadFlag, ReadRequest, StartTlsRequest

ADDRESSES: Final = tuple(f"127.0.0.{number}" for number in range(2, 10))
"""Addresses of the clients; none of them may have half of the port's connections."""
HOST: Final = "127.0.0.1"
LEDGER_ID: Final = 7
"""Ledger whose entries are requested."""
ENTRIES: Final = 16
"""Number of its entries."""
SECURED_SIZE: Final = 256 * 1024
"""Bytes that are sent over TLS: as many as the TLS library takes at once."""
READS_PER_ROUND: Final = 1600
"""Number of receptions after which a reader requests more."""
PAUSE_S: Final = 0.25
"""Seconds until a client connects again."""
BEGIN_S: Final = 0.5
"""Seconds within which all clients connect for the first time."""
_RECEIVE_BUFFER_SIZE: Final = 4096
_LENGTH: Final = struct.Struct(">i")
_UNFINISHED: Final = _LENGTH.pack(FRAME_SIZE_MAX - 4) + bytes(FRAME_SIZE_MAX - 5)
_START_TLS: Final = v3.encode_request(StartTlsRequest(0))
_READS: Final = v3.encode_requests(ReadRequest(n, LEDGER_ID, n % ENTRIES) for n in range(1000))
_OPERATIONS: Final = v3.encode_requests(
    request
    for n in range(2000)
    for request in (
        m.ForceLedgerRequest(n, LEDGER_ID),
        m.ReadLacRequest(n, LEDGER_ID),
        m.ListEntriesRequest(n, LEDGER_ID),
        m.BookieInfoRequest(n, 3),
    )
)
_POLLS: Final = v3.encode_requests(
    ReadRequest(n, LEDGER_ID, -1, flag=ReadFlag.ENTRY_PIGGYBACK, previous_lac=2**40, timeout_ms=600_000)
    for n in range(10)
)
_KEY: Final = master_key(b"")
_ADD: Final = v3.encode_request(
    m.AddRequest(
        1,
        LEDGER_ID + 1,
        0,
        _KEY,
        pack(
            Digester(DigestType.CRC32C),
            ledger_id=LEDGER_ID + 1,
            entry_id=0,
            lac=-1,
            length=SECURED_SIZE,
            payload=bytes(SECURED_SIZE),
        ),
    )
)


class Client:
    """One connection of an attacker. `sock` is connected and does not block."""

    def __init__(self, sock: socket.socket, randomness: random.Random) -> None:
        self.sock = sock
        self.randomness = randomness
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def receive(self) -> bytes:
        """Return some bytes; none once the bookie has closed the connection."""
        return await self._loop.sock_recv(self.sock, 65536)

    async def until_closed(self) -> None:
        """Read nothing, and return once the bookie has closed the connection."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        while not poll.poll(0):
            await asyncio.sleep(PAUSE_S)


Attack = Callable[[Client], Awaitable[None]]


async def silent(client: Client) -> None:
    await client.receive()


async def unfinished(client: Client) -> None:
    await client.send(_UNFINISHED)
    await client.receive()


async def slow(client: Client) -> None:
    for at in range(len(_UNFINISHED)):
        await client.send(_UNFINISHED[at : at + 1])
        await asyncio.sleep(1)


async def unread(client: Client) -> None:
    await client.send(_READS)
    await client.until_closed()


async def readers(client: Client) -> None:
    while True:
        await client.send(_READS[: len(_READS) // 10])
        for _ in range(READS_PER_ROUND):
            if not await client.receive():
                return


async def garbage(client: Client) -> None:
    randomness = client.randomness
    length = randomness.choice([-(2**31), -1, 0, 1, FRAME_SIZE_MAX - 4, FRAME_SIZE_MAX - 3, 0x0A0A0A0A, 2**31 - 1])
    start = randomness.choice([b"", _LENGTH.pack(length), _OPERATIONS[: randomness.randrange(1000)]])
    await client.send(start + randomness.randbytes(randomness.choice([0, 3, 5, 100, 100_000])))
    await client.receive()


async def operations(client: Client) -> None:
    while True:
        await client.send(_OPERATIONS)


async def polls(client: Client) -> None:
    await client.send(_POLLS)
    while await client.receive():
        pass


async def handshakes(client: Client) -> None:
    await client.send(_START_TLS)
    while await client.receive():
        pass


async def drains(client: Client) -> None:
    await client.send(_START_TLS)
    await client.receive()
    await client.send(b"\0\0")
    await client.receive()


@functools.cache
def _unchecked() -> ssl.SSLContext:
    """One for all clients: each context would read the authorities of the system."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def secured(client: Client) -> None:
    await client.send(_START_TLS)
    await client.receive()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = _unchecked().wrap_bio(incoming, outgoing)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            await client.send(outgoing.read())
            data = await client.receive()
            if not data:
                return
            incoming.write(data)
    tls.write(_ADD)
    await client.send(outgoing.read())
    while await client.receive():
        pass


ATTACKS: Final[Mapping[str, Attack]] = {
    attack.__name__: attack
    for attack in (silent, unfinished, slow, unread, readers, garbage, operations, polls, handshakes, drains, secured)
}


class Siege:
    """Clients that attack until they are stopped."""

    def __init__(self, attack: Attack, *, port: int, seed: int) -> None:
        self._attack = attack
        self._port = port
        self._randomness = random.Random(seed)
        self.connected = 0
        self.ended = 0
        """Number of connections that the bookie ended."""

    async def client(self, number: int) -> None:
        randomness = random.Random(self._randomness.random())
        await asyncio.sleep(randomness.random() * BEGIN_S)
        while True:
            with contextlib.suppress(OSError):
                await self._connect(ADDRESSES[number % len(ADDRESSES)], randomness)
            await asyncio.sleep(PAUSE_S)

    async def _connect(self, address: str, randomness: random.Random) -> None:
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_SIZE)
            sock.bind((address, 0))
            await asyncio.get_running_loop().sock_connect(sock, (HOST, self._port))
            self.connected += 1
            try:
                await self._attack(Client(sock, randomness))
            finally:
                self.ended += 1


async def besiege(attack: Attack, *, port: int, clients: int, seconds: float, seed: int) -> dict[str, int]:
    """Attack for `seconds`. Return the number of connections and of those that the bookie ended."""
    siege = Siege(attack, port=port, seed=seed)
    tasks = [asyncio.create_task(siege.client(number)) for number in range(clients)]
    await asyncio.sleep(seconds)
    counts = {"connected": siege.connected, "ended": siege.ended}
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if not isinstance(result, asyncio.CancelledError) and isinstance(result, BaseException):
            raise result
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = ATTACKS[args.attack]
    counts = asyncio.run(besiege(attack, port=args.port, clients=args.clients, seconds=args.seconds, seed=args.seed))
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
