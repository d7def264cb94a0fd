"""Fill and free the disks of a real bookie, repeatedly, on small file systems.

    python bench/full_disk.py --cycles 50

Each cycle fills a tmpfs to its last byte, or above the usage at which the bookie turns read-only. A filler file and the
bookie's own writes fill it alternately. The disk stays full for a while and is then freed. A writer and two readers are
connected while the bookie runs. Every few cycles, the bookie is stopped and started while the disk is full. The program
checks that

- the bookie turns read-only (its state and its registration), and is writable again after at most two disk checks;
- the bookie never dies, and reads return the right bytes all the time;
- all acknowledged entries are readable at the end and after another restart.

There are four bookies:

- `usage` has one file system. It turns read-only above 80 % usage, and writable again below 70 %.
- `enospc` has one file system and no usage limit, so that every write may fail with ENOSPC.
- `split` has one file system for the journal and one for ledgers, which are filled alternately.
- `shards` has a file system for each of two ledger directories, and one for the journals.

The file systems are mounted in a mount namespace of this process (`unshare`). They disappear when it ends, and the
program does not require root. Exit codes: 0 all checks passed, 1 a check failed.
"""

import argparse
import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings, ServerSettings
from bindery_bookie.storage.settings import KIB, MIB, StorageSettings
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.formats.ledger_metadata_codec import encode
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, ReadRequest, Response, Status
from bindery_kit.observability.logs import configure
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

KEY = b"k" * 20
LAYOUT = LedgersLayout()
LEDGER = encode(
    LedgerMetadata(ensemble_size=1, write_quorum=1, ack_quorum=1, segments=(Segment(EntryId(0), (BookieId("b0"),)),))
)
CHECK_INTERVAL_S = 1.0
WAIT_S = 30.0
LEDGERS = 4
BATCH = 16
ENTRY_SIZE = 3000

STORAGE = {
    "journal_file_size_max": 1 * MIB,
    "journal_retry_s": 0.05,
    "journal_group_size_max": 256 * KIB,
    "reserve_size": 3 * MIB,
    "write_cache_size_max": 512 * KIB,
    "flush_interval_s": 0.2,
    "flush_retry_s": 0.1,
    "flush_chunk_size": 64 * KIB,
    "entry_log_size_max": 4 * MIB,
    "read_cache_size_max": 256 * KIB,
    "index_write_buffer_size": 128 * KIB,
}


class Wrong(Exception):
    """A check failed."""


def body(ledger_id: int, entry_id: int) -> bytes:
    """The bytes of an entry, which depend only on its ids."""
    content = random.Random(ledger_id << 32 | entry_id).randbytes(ENTRY_SIZE)
    return struct.pack(">qqqq", ledger_id, entry_id, -1, 0) + content


class Link:
    """A client of the bookie with one connection. It sends the next batch after the responses to the previous one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._decoder = FrameDecoder()

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, requests: Sequence[AddRequest | ReadRequest]) -> list[Response]:
        self._writer.write(v3.encode_requests(requests))
        answers: dict[int, Response] = {}
        async with asyncio.timeout(WAIT_S):
            while len(answers) < len(requests):
                data = await self._reader.read(1 << 16)
                if not data:
                    raise Wrong("the bookie closed a connection")
                for message in self._decoder.feed(data):
                    answer = v3.decode_response(message)
                    answers[answer.txn_id] = answer
        return [answers[request.txn_id] for request in requests]

    def close(self) -> None:
        self._writer.close()


@dataclass
class Disk:
    """A mounted file system with a file that fills it."""

    path: Path

    @property
    def junk(self) -> Path:
        return self.path / "junk"

    def fill(self, *, leave: int = 0) -> None:
        """Extend the filler file until `leave` bytes are free."""
        with self.junk.open("ab", buffering=0) as file:
            while (free := self.free) > leave:
                try:
                    file.write(b"j" * min(free - leave, 1 << 20))
                except OSError:
                    return

    def clear(self) -> None:
        self.junk.unlink(missing_ok=True)

    @property
    def free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    @property
    def total(self) -> int:
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize


@dataclass
class Bookie:
    """A bookie that is restarted several times, with a writer and readers."""

    name: str
    disks: list[Disk]
    journal_dir: str
    ledger_dir: str
    usage_max: float
    usage_low: float
    seed: int
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    reads: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    next_ids: list[int] = field(default_factory=lambda: [0] * LEDGERS)
    is_up: bool = False

    def __post_init__(self) -> None:
        self.lots = random.Random(self.seed)
        self.tree = MemoryTree()
        self.settings = BookieSettings(
            port=0,
            http_port=0,
            bookie_id="b0",
            journal_dir=self.journal_dir,
            ledger_dir=self.ledger_dir,
            disk_usage_max=self.usage_max,
            disk_usage_low=self.usage_low,
            disk_usage_warn=self.usage_low,
            disk_check_interval_s=CHECK_INTERVAL_S,
            high_priority_free_size_min=0,
            server=ServerSettings(adds_size_max=256 * KIB),
            storage=StorageSettings(**STORAGE),  # type: ignore[arg-type]
        )

    async def _connect(self) -> MemoryStore:
        return self.tree.connect()

    async def start(self) -> float:
        """Start the bookie, its writer and its readers. Returns the duration of the start in seconds."""
        started = time.monotonic()
        self.shutdown = Shutdown()
        self.process = BookieProcess(
            self.settings,
            self.shutdown,
            connect=self._connect,
            clock=time.monotonic,
            wall_clock_ms=lambda: time.time_ns() // 1_000_000,
        )
        async with asyncio.timeout(WAIT_S):
            await self.process.start()
        if not self.acknowledged:
            for ledger_id in range(LEDGERS):  # a ledger without metadata would be deleted
                path = LAYOUT.ledger(LedgerId(ledger_id))
                await self.tree.connect().create(path, LEDGER, make_parents=True)
        self.is_up = True
        self.tasks = [asyncio.create_task(self._write()), *(asyncio.create_task(self._read()) for _ in range(2))]
        return time.monotonic() - started

    async def stop(self) -> None:
        self.is_up = False
        for task in self.tasks:
            await task
        await self.process.stop()

    def check(self) -> None:
        """Raise the error of a client that failed, or Wrong if a client or the bookie has ended."""
        for task in self.tasks:
            if task.done():
                task.result()
                raise Wrong(f"{self.name}: a client ended")
        if self.shutdown.reason:
            raise Wrong(f"{self.name}: the bookie ends: {self.shutdown.reason}")

    async def _write(self) -> None:
        link = Link(self.process.port)
        await link.connect()
        while self.is_up:
            ledger_id = self.lots.randrange(LEDGERS)
            first = self.next_ids[ledger_id]
            self.next_ids[ledger_id] += BATCH
            adds = [AddRequest(e, ledger_id, e, KEY, body(ledger_id, e)) for e in range(first, first + BATCH)]
            answers = await link.ask(adds)
            refused = False
            for add, answer in zip(adds, answers, strict=True):
                if answer.status == Status.OK:
                    self.acknowledged.append((ledger_id, add.entry_id))
                else:
                    refused = True
                    name = Status(answer.status).name
                    self.refused[name] = self.refused.get(name, 0) + 1
                    if answer.status not in (Status.READ_ONLY, Status.TOO_MANY_REQUESTS):
                        raise Wrong(f"{self.name}: an add was answered {name}")
            # The pauses limit the rate, so that the entries of 50 cycles fit on the disks. They are longer while the
            # bookie refuses adds.
            await asyncio.sleep(0.05 if refused else 0.004)
        link.close()

    async def _read(self) -> None:
        link = Link(self.process.port)
        await link.connect()
        while self.is_up:
            if self.acknowledged:
                await self._verify(link, [self.lots.choice(self.acknowledged) for _ in range(BATCH)])
            await asyncio.sleep(0.005)
        link.close()

    async def _verify(self, link: Link, keys: Sequence[tuple[int, int]]) -> None:
        answers: list[Any] = await link.ask([ReadRequest(at, *key) for at, key in enumerate(keys)])
        for key, answer in zip(keys, answers, strict=True):
            if answer.status != Status.OK or answer.body != body(*key):
                raise Wrong(f"{self.name}: entry {key} was answered {Status(answer.status).name}, or other bytes")
        self.reads += len(keys)

    async def verify_all(self) -> None:
        """Read all acknowledged entries and check them."""
        link = Link(self.process.port)
        await link.connect()
        for at in range(0, len(self.acknowledged), 64):
            await self._verify(link, self.acknowledged[at : at + 64])
        link.close()

    async def until(self, condition: Callable[[], Any], what: str) -> float:
        """Wait until `condition` is true. Returns the seconds waited. The condition may be a coroutine function."""
        started = time.monotonic()
        while True:
            self.check()
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return time.monotonic() - started
            if time.monotonic() - started > WAIT_S:
                states = [(state.path, state.status, state.reason) for state in self.process.watch.directories()]
                raise Wrong(f"{self.name}: not {what} in {WAIT_S} s: {self.process.state.reasons}, {states}")
            await asyncio.sleep(0.01)

    async def _is_registered(self, *, read_only: bool) -> bool:
        found = await self.tree.connect().exists(LAYOUT.bookie(BookieId("b0"), read_only=read_only))
        return found is not None

    def _is_read_only(self, disk: Disk, leave: int) -> bool:
        """Fill the disk until `leave` bytes are free. Return True if the bookie is read-only.

        Must be called repeatedly, because the bookie frees space when it deletes journal files. If `leave` is not 0,
        the bookie's own writes fill the rest.
        """
        disk.fill(leave=leave)
        return self.process.state.read_only

    async def cycle(self, number: int, *, restart: bool) -> dict[str, Any]:
        """Fill the disk and free it. `restart`: restart the bookie while the disk is full."""
        disk = self.disks[number % len(self.disks)]
        own = bool((number // len(self.disks)) % 2)
        await self.until(lambda: not self.process.state.read_only, "writable at the beginning")
        acknowledged, reads = len(self.acknowledged), self.reads
        leave = int(disk.total * (1 - self.usage_max)) + 768 * KIB if own else 0
        full_s = await self.until(lambda: self._is_read_only(disk, leave), "read-only")
        await self.until(lambda: self._is_registered(read_only=True), "registered as read-only")
        start_s = 0.0
        if restart:
            await self.stop()
            disk.fill()
            start_s = await self.start()
            await self.until(lambda: self._is_read_only(disk, 0), "read-only after a start on a full disk")
        read_before, until_s = self.reads, time.monotonic() + 0.3
        while time.monotonic() < until_s or self.reads == read_before:
            if restart or not own:
                disk.fill()  # fills the space that the bookie freed
            self.check()
            await asyncio.sleep(0.02)
        if not self.process.state.read_only:
            raise Wrong(f"{self.name}: writable while the disk is full")
        reasons = "; ".join(self.process.state.reasons.values())
        reads_while_full = self.reads - read_before
        disk.clear()
        back_s = await self.until(lambda: not self.process.state.read_only, "writable again")
        if back_s > 2 * CHECK_INTERVAL_S:
            raise Wrong(f"{self.name}: back only after {back_s:.2f} s")
        await self.until(lambda: self._is_registered(read_only=False), "registered as writable")
        count = len(self.acknowledged)
        await self.until(lambda: len(self.acknowledged) > count, "taking adds again")
        return {
            "bookie": self.name,
            "filled_by": "its own writes" if own else "somebody else",
            "disk": disk.path.name,
            "read_only_after_s": round(full_s, 2),
            "restart_s": round(start_s, 2),
            "back_after_s": round(back_s, 2),
            "acknowledged": len(self.acknowledged) - acknowledged,
            "reads": self.reads - reads,
            "reads_while_full": reads_while_full,
            "reason": reasons,
        }


def mounted(directory: Path, name: str, size: int) -> Disk:
    """A tmpfs of `size` bytes."""
    path = directory / name
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "bindery", str(path)], check=True)
    return Disk(path)


def bookies(directory: Path, seed: int) -> list[Bookie]:
    size = 64 * MIB
    usage, enospc = mounted(directory, "usage", size), mounted(directory, "enospc", size)
    journal, ledgers = mounted(directory, "journal", 24 * MIB), mounted(directory, "ledgers", 4 * size)
    shared, first, second = (mounted(directory, name, size) for name in ("shared", "first", "second"))
    return [
        Bookie("usage", [usage], f"{usage.path}/j", f"{usage.path}/l", 0.8, 0.7, seed),
        Bookie("enospc", [enospc], f"{enospc.path}/j", f"{enospc.path}/l", 1.0, 0.97, seed + 1),
        Bookie("split", [journal, ledgers], f"{journal.path}/j", f"{ledgers.path}/l", 1.0, 0.97, seed + 2),
        Bookie(
            "shards",
            [first, shared, second],
            f"{shared.path}/j",
            f"{first.path}/l,{second.path}/l",
            1.0,
            0.97,
            seed + 3,
        ),
    ]


async def run(
    directory: Path, *, cycles: int, seed: int, names: Sequence[str], restart_every: int, tell: Callable[[str], None]
) -> Any:
    chosen = [bookie for bookie in bookies(directory, seed) if not names or bookie.name in names]
    results = []
    for bookie in chosen:
        await initialize_cluster(bookie.tree.connect(), LAYOUT, randomness=random.Random(seed))
    per_bookie = [len(range(at, cycles, len(chosen))) for at in range(len(chosen))]
    for bookie, count in zip(chosen, per_bookie, strict=True):
        await bookie.start()
        await bookie.until(lambda: len(bookie.acknowledged) >= 2 * BATCH, "taking adds")  # noqa: B023
        for number in range(count):
            restart = number % restart_every == restart_every - 1
            results.append(await bookie.cycle(number, restart=restart))
            tell(json.dumps(results[-1]))
        await bookie.stop()
        await bookie.start()
        await bookie.verify_all()
        await bookie.stop()
    return {
        "cycles": len(results),
        "acknowledged": sum(len(bookie.acknowledged) for bookie in chosen),
        "reads": sum(bookie.reads for bookie in chosen),
        "restarts": sum(result["restart_s"] > 0 for result in results),
        "back_after_s_max": max(result["back_after_s"] for result in results),
        "restart_s_max": max(result["restart_s"] for result in results),
        "refused": {bookie.name: bookie.refused for bookie in chosen},
    }


def enter_namespace() -> None:
    """Restart this program in a mount namespace of its own."""
    if os.environ.get("BINDERY_OWN_MOUNTS"):
        return
    how = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*how, "true"], capture_output=True).returncode:
        how = ["unshare", "--map-root-user", "--mount"]
    environment = {**os.environ, "BINDERY_OWN_MOUNTS": "1"}
    os.execvpe(how[0], [*how, sys.executable, *sys.argv], environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--restart-every", type=int, default=5, help="number of cycles per restart of a bookie")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bookie", action="append", default=[], choices=["usage", "enospc", "split", "shards"])
    parser.add_argument("--json", action="store_true", help="print the summary as JSON only")
    parser.add_argument("--log-level", default="critical")
    arguments = parser.parse_args()
    enter_namespace()
    configure(service="bookie", level=arguments.log_level)
    tell = (lambda line: None) if arguments.json else (lambda line: print(line, flush=True))
    with tempfile.TemporaryDirectory(prefix="bindery-full-disk-") as directory:
        try:
            summary = uvloop.run(
                run(
                    Path(directory),
                    cycles=arguments.cycles,
                    seed=arguments.seed,
                    names=arguments.bookie,
                    restart_every=arguments.restart_every,
                    tell=tell,
                )
            )
        except Wrong as error:
            print(f"WRONG: {error}", file=sys.stderr)
            return 1
        finally:
            for path in Path(directory).iterdir():
                subprocess.run(["umount", "--lazy", str(path)], check=False)
    print(json.dumps(summary, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
