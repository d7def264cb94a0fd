"""Run a standalone cluster of real processes under load, and check every replica.

| part        | contents                                                                                   |
|-------------|--------------------------------------------------------------------------------------------|
| World       | `bindery standalone` with short delays, and the `bindery` command as processes             |
| Load        | concurrent load: messages through the broker, and raw ledgers through Bindery's client     |
| watching    | all lines of a concurrent `bindery recovery status --watch --json`                         |
| inspect     | reads every entry of every ledger from each bookie of its write set                        |
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from bindery.standalone.control import ask
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_recovery.writer_reports import WriterReports

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli" / "tests"))
from command import bindery  # type: ignore[import-not-found]

MIB: Final = 2**20
ENTRY_SIZE: Final = 32 * 1024
ENTRIES_PER_LEDGER: Final = 48
TOPICS: Final = ("orders", "payments")
MESSAGE_SIZE: Final = 4096
SLOW_PAUSE_S: Final = 0.3
"""Seconds between batches of eight entries after the required amount is written. The slower load leaves the machine
time for recovery."""
SETTLE_S: Final = 5.0
"""Seconds after which a writer reports an under-replicated ledger. More than this cluster's bookie sessions (4 s)."""
COMMAND_TIMEOUT_S: Final = 150.0
CHANGE_TIMEOUT_S: Final = 120.0
COPYING: Final = {
    "AUDITOR_OPEN_LEDGER_GRACE_S": "2",
    "AUDITOR_DRAIN_INTERVAL_S": "2",
    "AUDITOR_BYTES_PER_S_MAX": str(3 * MIB // 4),
    "AUDITOR_BYTES_PER_S_MIN": str(MIB // 4),
}
"""Settings with delays and intervals of seconds, and with a copy rate that is low enough to observe the progress."""


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def say(text: str) -> None:
    """Print a measurement; `make healing` shows it at its end."""
    print(f"    {text}", flush=True)


class World:
    """A cluster, created by `world` and used by all scenarios of a module."""

    def __init__(self, cluster: ThrowawayCluster, *, zookeepers: int = 1) -> None:
        self.cluster = cluster
        port = int(cluster.zookeeper.rpartition(":")[2])
        self.zookeeper = ",".join(f"127.0.0.1:{port + i}" for i in range(zookeepers))

    # --- processes ----------------------------------------------------------------------------------------------------

    def end(self, name: str) -> None:
        """Kill a process with SIGKILL and keep it stopped."""
        self.cluster.kill(name)
        self.stop(name)

    def stop(self, name: str) -> None:
        """Stop a process in order and keep it stopped."""
        self._change("stop", name)

    def start(self, name: str) -> None:
        """Start a process and wait until it is ready."""
        self._change("start", name)

    def start_held(self) -> None:
        """Start all processes that are kept stopped."""
        status = self.cluster.status()
        assert status is not None
        for process in status["processes"]:
            if process["held"]:
                self.start(process["name"])

    def _change(self, verb: str, name: str) -> None:
        request = {"verb": verb, "name": name}
        answer = ask(self.cluster.directory.control_socket, request, timeout_s=CHANGE_TIMEOUT_S)
        assert answer is not None, "the supervisor does not answer"
        assert "error" not in answer, answer

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.cluster.pid(name), number)

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """Stop processes with SIGSTOP during the block: they keep their connections, but do not respond."""
        pids = [self.cluster.pid(name) for name in names]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def log(self, name: str) -> str:
        """The output of the process."""
        return self.cluster.directory.log_file(name).read_text(errors="replace")

    def log_events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Log records of the process with this event, oldest first."""
        found = []
        for line in self.log(name).splitlines():
            with contextlib.suppress(ValueError):
                facts = json.loads(line)
                if isinstance(facts, dict) and facts.get("event") == event:
                    found.append(facts)
        return found

    # --- commands -----------------------------------------------------------------------------------------------------

    async def run(self, *words: str, code: int = 0) -> str:
        """Run `bindery ...`, which must exit with `code`.

        Returns standard output, followed by standard error if `code` is not 0.
        """

        def call() -> Any:
            return bindery(*words, "--zookeeper", self.zookeeper, timeout_s=COMMAND_TIMEOUT_S)

        done = await asyncio.to_thread(call)
        assert done.returncode == code, f"bindery {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout if code == 0 else done.stdout + done.stderr)

    async def lines(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        text = await self.run(*words, "--json", code=code)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    async def status(self) -> dict[str, Any]:
        (facts,) = await self.lines("recovery", "status")
        return facts

    async def members(self) -> dict[str, dict[str, Any]]:
        return {member["bookie_id"]: member for member in await self.lines("bookie", "members")}

    async def leader(self) -> str:
        """Name of the leader among the auditors."""
        found: list[str] = []

        async def elected() -> bool:
            auditor = (await self.status())["auditor"]
            found.extend([auditor] if auditor else [])
            return bool(found)

        await until(elected, "an auditor is the leader")
        return found[0]

    # --- metrics ------------------------------------------------------------------------------------------------------

    async def metric(self, name: str) -> float:
        """Sum of a metric over all running auditors."""
        total = 0.0
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            for number in range(self.cluster.auditors):
                with contextlib.suppress(httpx.TransportError):
                    page = (await http.get(f"{self.cluster.auditor_url(number)}/metrics")).text
                    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
                    assert lines, f"no metric {name}"
                    total += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        return total

    async def entries_copied(self) -> int:
        return int(await self.metric("bindery_recovery_this_entries_copied_total"))

    # --- the metadata -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def client(self) -> AsyncIterator["Metadata"]:
        store = await ZooKeeperStore.connect(self.zookeeper)
        try:
            layout, rng = LedgersLayout(), random.SystemRandom()
            marks = UnderreplicationManager(store, layout, randomness=rng, clock_ms=wall_clock_ms)
            records = RecoveryRecords(store)
            reports = WriterReports(store, layout, randomness=rng, clock_ms=wall_clock_ms, settle_s=SETTLE_S)
            reporting = asyncio.create_task(reports.run())
            client = await LedgerClient.connect(store, randomness=rng, on_degraded=reports.degraded)
            try:
                yield Metadata(store, client, marks, records, reports)
            finally:
                await client.close()
                reporting.cancel()
                await reports.close()
        finally:
            await store.close()


class Metadata:
    """A ZooKeeper session of the test, with a client and access to the metadata."""

    def __init__(
        self,
        store: ZooKeeperStore,
        client: LedgerClient,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        reports: WriterReports,
    ) -> None:
        self.store = store
        self.client = client
        self.marks = marks
        self.records = records
        self.reports = reports

    async def marked(self) -> list[int]:
        return [int(mark.ledger_id) async for mark in self.marks.list()]

    async def ledgers(self) -> dict[LedgerId, LedgerMetadata]:
        return {ledger_id: await self.client.metadata(ledger_id) async for ledger_id in self.client.list_ledgers()}

    async def ledgers_of(self, bookie_id: str) -> list[int]:
        """Ledgers with the bookie in an ensemble of any segment."""
        found = await self.ledgers()
        return [int(i) for i, m in found.items() if any(bookie_id in segment.ensemble for segment in m.segments)]

    async def history(self, *, since_ms: int = 0) -> list[HistoryEvent]:
        """Events of the recovery history, oldest first."""
        events = await self.records.history(1000)
        return [event for event in reversed(events) if event.at_ms >= since_ms]

    async def whole(self, bookie_id: str) -> bool:
        """Whether no ensemble contains the bookie and no ledger is marked."""
        return not await self.marked() and not await self.ledgers_of(bookie_id)


@contextmanager
def world(*, auditors: int = 3, zookeepers: int = 1, environment: dict[str, str] | None = None) -> Iterator[World]:
    settings = {**COPYING, **(environment or {})}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        began = time.monotonic()
        with ThrowawayCluster(auditors=auditors, options=("--zookeepers", str(zookeepers))) as cluster:
            took_s = time.monotonic() - began
            say(f"cluster: 4 bookies, {auditors} auditors, {zookeepers} ZooKeeper, up in {took_s:.1f} s")
            yield World(cluster, zookeepers=zookeepers)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def until(condition: Callable[[], Any], what: str, *, timeout_s: float = 90.0, poll_s: float = 0.25) -> float:
    """Wait until `condition()` is true, and return the seconds waited."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:.0f} s: {what}"
        await asyncio.sleep(poll_s)
    return time.monotonic() - began


# --- load -------------------------------------------------------------------------------------------------------------


def entry_payload(ledger_id: int, entry_id: int) -> bytes:
    """Payload of an entry of a raw ledger, computed from its position."""
    return random.Random(ledger_id * 1_000_003 + entry_id).randbytes(ENTRY_SIZE + entry_id % 11)


@dataclass
class Sent:
    """Responses that the clients of the load received, in order of time (monotonic seconds)."""

    messages: dict[str, str] = field(default_factory=dict)
    """Message id -> payload, of responses with status 200."""
    refused: list[tuple[float, str]] = field(default_factory=list)
    """(time, error) of each failed produce request."""
    answered_at: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    ledgers: dict[int, int] = field(default_factory=dict)
    """Raw ledger -> number of acknowledged entries."""
    ledger_errors: list[tuple[float, str]] = field(default_factory=list)
    reported: int = 0
    """Number of raw ledgers that their writer marked, because it continued with a missing replica."""

    @property
    def raw_bytes(self) -> int:
        return sum(self.ledgers.values()) * ENTRY_SIZE

    def gap_s(self, since: float) -> float:
        """Longest time in seconds without a response to any producer, from `since` on."""
        times = [since, *(at for at in self.answered_at if at >= since)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Load:
    """Load that runs within `async with`; its writers are closed at the end of the block."""

    def __init__(
        self, world: World, *, raw: bool = True, pause_s: float = 0.05, topics: tuple[str, ...] = TOPICS
    ) -> None:
        self.sent = Sent()
        self._world = world
        self._raw = raw
        self._pause_s = self._raw_pause_s = pause_s
        self._over = asyncio.Event()
        self._unclosed: set[int] = set()
        """Raw ledgers that their writer has not closed."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._produce(topic)) for topic in TOPICS]
        if self._raw:
            self._tasks.append(asyncio.create_task(self._write()))
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._over.set()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        if kind is None:
            for outcome in ended:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def grown_to(self, size: int) -> None:
        """Wait until raw ledgers have `size` bytes."""

        async def enough() -> bool:
            assert not any(task.done() for task in self._tasks), "the load has ended"
            return self.sent.raw_bytes >= size

        self._raw_pause_s = self._pause_s
        took_s = await until(enough, f"{size} bytes of load", timeout_s=120, poll_s=0.1)
        self._raw_pause_s = SLOW_PAUSE_S
        say(
            f"load: {self.sent.raw_bytes / MIB:.1f} MiB in raw ledgers after {took_s:.1f} s, "
            f"{len(self.sent.messages)} messages in topics"
        )

    async def _produce(self, topic: str) -> None:
        path = f"/v1/topics/public/default/{topic}/messages"
        async with httpx.AsyncClient(base_url=self._world.cluster.url, timeout=60, trust_env=False) as http:
            for number in itertools.count():
                if self._over.is_set():
                    return
                text = f"{topic} {number} {time.monotonic_ns()} ".ljust(MESSAGE_SIZE, "x")
                began = time.monotonic()
                try:
                    response = await http.post(path, content=text, headers={"content-type": "text/plain"})
                except httpx.HTTPError as error:
                    self.sent.refused.append((time.monotonic(), f"{type(error).__name__} {error}"))
                    await asyncio.sleep(0.2)
                    continue
                now = time.monotonic()
                if response.status_code == 200:
                    self.sent.messages[response.json()["message_ids"][0]] = text
                    self.sent.answered_at.append(now)
                    self.sent.slowest_s = max(self.sent.slowest_s, now - began)
                else:
                    self.sent.refused.append((now, f"{response.status_code} {response.text[:200]}"))
                    await asyncio.sleep(0.2)
                await asyncio.sleep(self._pause_s)

    async def _write(self) -> None:
        async with self._world.client() as metadata:
            while not self._over.is_set():
                try:
                    await self._write_one(metadata.client)
                except BinderyError as error:
                    self.sent.ledger_errors.append((time.monotonic(), f"{type(error).__name__}: {error}"))
                    await asyncio.sleep(0.3)
            if metadata.reports.waiting:

                async def reported() -> bool:
                    return not metadata.reports.waiting

                await until(reported, "under-replicated ledgers of the load are marked", timeout_s=30)
            await self._close_broken(metadata.client)
            self.sent.reported += metadata.reports.marked

    async def _close_broken(self, client: LedgerClient) -> None:
        """Recover the ledgers whose writer failed. Recovery closes them; missing replicas of an open ledger are not
        created, so its mark would remain."""

        async def recovered() -> bool:
            for ledger_id in sorted(self._unclosed):
                try:
                    reader = await client.open(LedgerId(ledger_id), recover=True)
                except BinderyError as error:
                    self.sent.ledger_errors.append((time.monotonic(), f"{type(error).__name__}: {error}"))
                    return False
                await reader.release()
                self._unclosed.discard(ledger_id)
            return True

        await until(recovered, "ledgers whose writer failed are recovered", timeout_s=60)

    async def _write_one(self, client: LedgerClient) -> None:
        writer = await client.create(custom={"load": b"raw"})
        ledger_id = int(writer.ledger_id)
        self.sent.ledgers[ledger_id] = 0
        self._unclosed.add(ledger_id)
        while self.sent.ledgers[ledger_id] < ENTRIES_PER_LEDGER and not self._over.is_set():
            first = self.sent.ledgers[ledger_id]
            await writer.add_many([entry_payload(ledger_id, first + i) for i in range(8)])
            self.sent.ledgers[ledger_id] = first + 8
            await asyncio.sleep(self._raw_pause_s)
        await writer.close()
        self._unclosed.discard(ledger_id)


async def read_messages(world: World, topic: str) -> dict[str, str]:
    """Message id -> payload of all messages of the topic."""
    found: dict[str, str] = {}
    start = "earliest"
    async with httpx.AsyncClient(base_url=world.cluster.url, timeout=60, trust_env=False) as http:
        while True:
            path = f"/v1/topics/public/default/{topic}/messages"
            response = await http.get(path, params={"start": start, "max": 500})
            assert response.status_code == 200, response.text
            body = response.json()
            if not body["messages"]:
                return found
            found.update({message["message_id"]: message["payload"] for message in body["messages"]})
            start = body["next"]


async def check_messages(world: World, sent: Sent) -> None:
    """Check that each acknowledged message can be read unchanged."""
    found: dict[str, str] = {}
    for topic in TOPICS:
        found |= await read_messages(world, topic)
    lost = [message_id for message_id, text in sent.messages.items() if found.get(message_id) != text]
    assert not lost, f"{len(lost)} acknowledged messages are missing or changed, such as {lost[:3]}"
    say(f"messages: all {len(sent.messages)} acknowledged ones read back")


async def forget(world: World, sent: Sent) -> None:
    """Delete the raw ledgers, so that the next scenario does not have to repair them, too."""
    async with world.client() as metadata:
        for ledger_id in sent.ledgers:
            await metadata.client.delete(LedgerId(ledger_id))


# --- every replica ----------------------------------------------------------------------------------------------------


@dataclass
class Inspection:
    ledgers: int = 0
    entries: int = 0
    replicas: int = 0
    size: int = 0
    """Payload bytes of all replicas."""


def seal_topics(cluster: World) -> None:
    """Restart the broker, which closes its ledgers. Entries of an open ledger's last segment are copied only after
    that."""
    cluster.stop("broker-0")
    cluster.start("broker-0")


async def inspect(world: World, sent: Sent, *, never: str | None = None) -> Inspection:
    """Read every entry of every ledger from each bookie of its write set, and check it.

    All Qw replicas must be readable, match their digest, and agree in payload and length field. The length must grow by
    each payload. Raw ledgers must have the payloads that were sent. `never`: a bookie that no ensemble may contain. The
    check begins when no ledger is marked and no closed ledger has a closing record.
    """
    found = Inspection()
    async with world.client() as metadata:
        closing_records = ClosingRecords(metadata.store)

        async def is_clear() -> bool:
            """Whether no ledger is marked and no closed ledger has a closing record. Open ledgers keep theirs."""
            if await metadata.marked():
                return False
            recorded, ledgers = set(await closing_records.ledger_ids()), await metadata.ledgers()
            return not any(ledgers[one].state is LedgerState.CLOSED for one in recorded & ledgers.keys())

        try:
            await until(is_clear, "no mark and no closing record is left", timeout_s=180)
        except AssertionError:
            say(f"closing records: {await closing_records.ledger_ids()}")
            for ledger_id in await metadata.marked():
                say(f"marked: {await metadata.records.get(LedgerId(ledger_id))}")
            raise
        ledgers = await metadata.ledgers()
        for ledger_id, facts in ledgers.items():
            if never is not None:
                assert all(never not in segment.ensemble for segment in facts.segments), (
                    f"{never} is in an ensemble of {ledger_id}"
                )
            last = await _last_confirmed(metadata.client, ledger_id, facts)
            await _inspect_ledger(metadata.client, ledger_id, facts, last, found)
            acknowledged = sent.ledgers.get(int(ledger_id), 0)
            assert last + 1 >= acknowledged, f"ledger {ledger_id}: {acknowledged} acknowledged, {last + 1} readable"
        missing = sent.ledgers.keys() - {int(ledger_id) for ledger_id in ledgers}
        assert not missing, missing
    say(
        f"inspection: {found.ledgers} ledgers, {found.entries} entries, {found.replicas} replicas "
        f"({found.size / MIB:.1f} MiB) read one by one, all good and equal"
    )
    return found


async def _last_confirmed(client: LedgerClient, ledger_id: LedgerId, facts: LedgerMetadata) -> int:
    """Last add confirmed of the ledger; -1: none."""
    if facts.state is LedgerState.CLOSED:
        return int(facts.last_entry_id)
    reader = await client.open(ledger_id, password=facts.password or b"", recover=False)
    last = await reader.read_last_confirmed()
    await reader.release()
    return last


def _entries_by_bookie(facts: LedgerMetadata, last: int) -> dict[BookieId, list[EntryId]]:
    """Bookie -> entries that it must store."""
    wanted: dict[BookieId, list[EntryId]] = {}
    for entry in range(last + 1):
        ensemble = facts.segment_of(EntryId(entry)).ensemble
        for index in write_set(entry_id=entry, ensemble_size=facts.ensemble_size, write_quorum=facts.write_quorum):
            wanted.setdefault(ensemble[index], []).append(EntryId(entry))
    return wanted


async def _inspect_ledger(
    client: LedgerClient, ledger_id: LedgerId, facts: LedgerMetadata, last: int, found: Inspection
) -> None:
    copies: dict[int, list[tuple[BookieId, bytes, int]]] = {}

    def take(replica: ReplicaRead) -> ReplicaRead:
        return replica

    for bookie_id, entries in _entries_by_bookie(facts, last).items():
        for at in range(0, len(entries), 64):
            for replica in await client.read_replicas(ledger_id, facts, bookie_id, entries[at : at + 64], take):
                where = f"ledger {ledger_id} entry {replica.entry_id} on {bookie_id}"
                assert replica.verdict is Verdict.GOOD, f"{where}: {replica.verdict.value} {replica.reason}"
                assert replica.payload is not None
                assert replica.length is not None
                copies.setdefault(int(replica.entry_id), []).append((bookie_id, replica.payload, replica.length))
    length = 0
    is_raw = facts.custom.get("load") == b"raw"
    for entry in range(last + 1):
        replicas = copies[entry]
        assert len({bookie_id for bookie_id, _, _ in replicas}) == facts.write_quorum
        ((payload, stated),) = {(payload, stated) for _, payload, stated in replicas}
        length += len(payload)
        assert stated == length, f"ledger {ledger_id} entry {entry} has the length {stated}, expected {length}"
        if is_raw:
            assert payload == entry_payload(int(ledger_id), entry), f"ledger {ledger_id} entry {entry}: payload differs"
        found.entries += 1
        found.replicas += len(replicas)
        found.size += len(payload) * len(replicas)
    if facts.state is LedgerState.CLOSED:
        assert facts.length == length
    found.ledgers += 1


async def count_holes(world: World) -> tuple[int, int]:
    """(missing replicas, ledgers with missing replicas) among the confirmed entries of all ledgers."""
    copies = ledgers = 0
    async with world.client() as metadata:
        for ledger_id, facts in (await metadata.ledgers()).items():
            last = await _last_confirmed(metadata.client, ledger_id, facts)
            absent = 0
            for bookie_id, entries in _entries_by_bookie(facts, last).items():
                verdicts = await metadata.client.read_replicas(
                    ledger_id, facts, bookie_id, entries, lambda replica: replica.verdict
                )
                absent += verdicts.count(Verdict.ABSENT)
            copies += absent
            ledgers += bool(absent)
    return copies, ledgers


# --- watching ---------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    lines: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """(wall clock time, status) of each line."""

    def estimates(self, healed_at: float) -> list[tuple[float, float]]:
        """(estimated seconds, actual seconds) of each line with marked ledgers and an estimate."""
        return [
            (float(facts["eta_s"]), healed_at - at)
            for at, facts in self.lines
            if facts["marked"]["ledgers"] and facts["eta_s"] and at < healed_at
        ]


@asynccontextmanager
async def watching(world: World) -> AsyncIterator[Watched]:
    """Run `bindery recovery status --watch --json` during the block."""
    watched = Watched()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bindery", "recovery", "status", "--watch", "--json"),
        *("--zookeeper", world.zookeeper),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=4 * MIB,
    )

    async def read() -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            watched.lines.append((time.time(), json.loads(line)))

    reading = asyncio.create_task(read())
    try:
        yield watched
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        await reading
