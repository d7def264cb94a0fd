"""Fuzz the ledger port of real bookie processes: malformed frames by seed, in both protocols, in clear text and with
TLS.

Two bookies run on this machine. Both offer TLS, and one requires a token. While frames are sent, the program checks
that
- the processes run and log no internal error;
- a well-behaved client completes an add and a read within HEALTHY_S, on an existing and on a new connection;
- resident memory stays below RSS_MAX_MIB.
At the end, both bookies must stop in order. The frames depend only on the seed; their interleaving does not.

    make fuzz                                       30 seconds, a new seed
    .venv/bin/python bench/fuzz_wire.py --frames 1000000 --seed 7
    .venv/bin/python bench/fuzz_wire.py --seed 7 --only 1234     one connection of that run

Exit codes: 0, or 1 with the reason and the command that repeats the run.
"""

import argparse
import asyncio
import contextlib
import random
import ssl
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import uvloop
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_simulation.certificates import CA, certificate, key
from bindery_simulation.wire_fuzz import Plan, plan
from fuzzed_process import RSS_MAX_MIB, Failed, FuzzedProcess, attack, empty_cluster, free_port

HEALTHY_S = 5.0
CONNECTIONS = 24
CONNECTION_LIMIT_S = 20.0
SECRET = b"the secret of the fuzzed bookie"
HEALTHY_LEDGER = 2**50
DIGESTER = Digester(DigestType.CRC32C, b"healthy")


class Bookie(FuzzedProcess):
    def __init__(self, directory: Path, name: str, zookeeper: str, arguments: list[str], *, guarded: bool) -> None:
        directory.mkdir()
        self.port = free_port()
        self.guarded = guarded
        command = [
            "-m", "bindery_bookie", "--bookie-id", name, "--port", str(self.port),
            "--http-port", "0", "--zookeeper", zookeeper, "--journal-dir", str(directory / "journal"),
            "--ledger-dir", str(directory / "ledgers"), "--tls-certificate-file", str(certificate("bookie")),
            "--tls-key-file", str(key("bookie")), *arguments,
        ]  # fmt: skip
        super().__init__(name, command, directory / "log")


def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CA)


class Connection:
    """A connection to a bookie, with or without TLS and authentication."""

    def __init__(self, bookie: Bookie) -> None:
        self.bookie = bookie
        self.decoder = FrameDecoder()
        self.messages: list[bytes] = []
        self.answered_size = 0

    async def open(self, *, tls: bool, token: bool, hasty: bool = False) -> None:
        """`hasty`: send the token in clear text directly after START_TLS, as Apache's client does."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.bookie.port)
        token = token and self.bookie.guarded
        auth = v3.encode_request(m.AuthRequest(0, "bindery", SECRET))
        if tls:
            self.writer.write(v3.encode_request(m.StartTlsRequest(0)))
            if token and hasty:
                await asyncio.sleep(0)
                self.writer.write(auth)
            await self.receive()
            await self.writer.start_tls(tls_context(), server_hostname="localhost")
        if token:
            if not (tls and hasty):
                self.writer.write(auth)
            if tls:
                await self.receive()

    async def receive(self) -> bytes:
        while not self.messages:
            data = await self.reader.read(65536)
            if not data:
                raise EOFError
            self.messages += self.decoder.feed(data)
        return self.messages.pop(0)

    async def drain(self) -> None:
        """Read until the bookie closes the connection."""
        with contextlib.suppress(OSError):
            while data := await self.reader.read(65536):
                self.answered_size += len(data)

    def abort(self) -> None:
        with contextlib.suppress(AttributeError):
            self.writer.transport.abort()


class Fuzzer:
    def __init__(self, seed: int, bookies: list[Bookie]) -> None:
        self.seed = seed
        self.bookies = bookies
        self.frames = 0
        self.connections = 0
        self.answered_size = 0
        self.healthy_ms_max = 0.0
        self.ends: Counter[str] = Counter()
        self.next_number = 0

    async def run_plan(self, one: Plan) -> None:
        """Send the frames of one connection. Any end of the connection is accepted, but it must end."""
        bookie = self.bookies[one.number % 3 == 0]
        connection = Connection(bookie)
        reading = None
        try:
            async with asyncio.timeout(CONNECTION_LIMIT_S):
                await connection.open(tls=one.tls, token=one.token, hasty=one.number % 2 == 1)
                reading = asyncio.create_task(connection.drain())
                for piece, complete in one.pieces(self.seed):
                    if reading.done() or connection.writer.transport.is_closing():
                        self.ends["closed by the bookie"] += 1
                        break
                    connection.writer.write(piece)
                    self.frames += complete
                    if one.number % 2:
                        await connection.writer.drain()
                else:
                    await self._end(one, connection, reading)
        except TimeoutError:  # an OSError, too: it comes first
            raise Failed(f"connection {one.number} hung for {CONNECTION_LIMIT_S} s") from None
        except (OSError, EOFError):
            self.ends["broken by the bookie"] += 1
        finally:
            connection.abort()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        self.answered_size += connection.answered_size
        self.connections += 1

    async def _end(self, one: Plan, connection: Connection, reading: "asyncio.Task[None]") -> None:
        """End the connection: usually after the bookie has read all frames, sometimes before."""
        if one.number % 8 == 0:
            self.ends["gone at once"] += 1
        elif connection.writer.can_write_eof():
            connection.writer.write_eof()
            await reading
            self.ends["read to the end"] += 1
        else:
            await asyncio.wait([reading], timeout=0.05)
            self.ends["through TLS"] += 1

    async def worker(self, frames_max: int | None, deadline: float | None) -> None:
        while True:
            if frames_max is not None and self.frames >= frames_max:
                return
            if deadline is not None and time.monotonic() >= deadline:
                return
            number, self.next_number = self.next_number, self.next_number + 1
            await self.run_plan(plan(self.seed, number))

    async def watch(self) -> None:
        """Run a well-behaved client and check each process, twice per second."""
        lasting = {bookie.name: await self._healthy(bookie) for bookie in self.bookies}
        entry_id = 0
        while True:
            for bookie in self.bookies:
                bookie.check()
                for connection in (lasting[bookie.name], await self._healthy(bookie)):
                    await self._ask(connection, entry_id)
                    entry_id += 1
                connection.abort()
            await asyncio.sleep(0.5)

    async def _healthy(self, bookie: Bookie) -> Connection:
        connection = Connection(bookie)
        async with self._bound(bookie):
            await connection.open(tls=bookie.guarded, token=True)
        return connection

    async def _ask(self, connection: Connection, entry_id: int) -> None:
        started = time.monotonic()
        body = pack(DIGESTER, ledger_id=HEALTHY_LEDGER, entry_id=entry_id, lac=-1, length=2**40, payload=b"healthy")
        async with self._bound(connection.bookie):
            add = m.AddRequest(1, HEALTHY_LEDGER, entry_id, DIGESTER.master_key, body)
            connection.writer.write(v3.encode_request(add))
            answer = v3.decode_response(await connection.receive())
            connection.writer.write(v3.encode_request(m.ReadRequest(2, HEALTHY_LEDGER, entry_id)))
            found = v3.decode_response(await connection.receive())
        if answer != m.AddResponse(1, 0, HEALTHY_LEDGER, entry_id):
            raise Failed(f"a healthy add was answered {answer}")
        if not isinstance(found, m.ReadResponse) or found.body != body:
            raise Failed(f"a healthy read was answered {found}")
        self.healthy_ms_max = max(self.healthy_ms_max, 1000 * (time.monotonic() - started))

    @contextlib.asynccontextmanager
    async def _bound(self, bookie: Bookie):  # type: ignore[no-untyped-def]
        try:
            async with asyncio.timeout(HEALTHY_S):
                yield
        except (OSError, EOFError, TimeoutError) as error:
            bookie.check()
            raise Failed(f"{bookie.name} did not serve a healthy client within {HEALTHY_S} s: {error!r}") from error


async def fuzz(arguments: argparse.Namespace, directory: Path) -> None:
    secrets = directory / "secrets"
    secrets.write_bytes(SECRET)
    guard = ["--auth-provider", "token", "--auth-secrets-file", str(secrets)]
    bookies: list[Bookie] = []
    async with empty_cluster(directory) as zookeeper:
        try:
            bookies += [
                Bookie(directory / "open", "open", zookeeper, [], guarded=False),
                Bookie(directory / "guarded", "guarded", zookeeper, guard, guarded=True),
            ]
            for bookie in bookies:
                await bookie.until_logged("bookie_started")
            await run(Fuzzer(arguments.seed, bookies), arguments)
            for bookie in bookies:
                bookie.check()
                await bookie.stop()
        finally:
            for bookie in bookies:
                bookie.kill()


async def run(fuzzer: Fuzzer, arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    if arguments.only is not None:
        attackers = [fuzzer.run_plan(plan(arguments.seed, arguments.only))]
    else:
        attackers = [fuzzer.worker(arguments.frames, deadline) for _ in range(CONNECTIONS)]
    seconds = await attack(fuzzer.watch(), attackers)
    print(
        f"{fuzzer.frames} frames on {fuzzer.connections} connections in {seconds:.0f} s "
        f"({fuzzer.frames / seconds:.0f} frames/s), seed {arguments.seed}\n"
        f"  ends: {dict(fuzzer.ends)}; {fuzzer.answered_size / 2**20:.0f} MiB of answers\n"
        f"  slowest healthy add and read: {fuzzer.healthy_ms_max:.0f} ms (bound {1000 * HEALTHY_S:.0f})\n"
        + "".join(
            f"  {b.name}: at most {b.rss_mib_max:.0f} MiB resident (bound {RSS_MAX_MIB})\n" for b in fuzzer.bookies
        ),
        end="",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, help="maximum number of frames")
    parser.add_argument("--seconds", type=float, help="maximum seconds (default: 30 without --frames)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run only this connection")
    arguments = parser.parse_args()
    if arguments.frames is None and arguments.seconds is None:
        arguments.seconds = 30.0
    with tempfile.TemporaryDirectory(prefix="bindery-fuzz-") as directory:
        try:
            uvloop.run(fuzz(arguments, Path(directory)))
        except Failed as error:
            length = f"--frames {arguments.frames}" if arguments.frames else f"--seconds {arguments.seconds:g}"
            print(f"FAILED: {error}\nrepeat with: .venv/bin/python {sys.argv[0]} --seed {arguments.seed} {length}")
            return 1
    print("no crash, no hang, memory bounded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
