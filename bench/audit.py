"""Measure an audit: its speed and memory when it verifies every replica, and its effect on writers.

    .venv/bin/python bench/audit.py                  # 128, 256 and 512 MiB of payload
    .venv/bin/python bench/audit.py --write-docs     # 512 MiB, 1 GiB and 2 GiB; updates docs/benchmarks.md
    .venv/bin/python bench/audit.py --mib 10240 --sizes 1 --only-audits     # 10 GiB; 30 GiB of disk

Creates a cluster with three bookies. The payload doubles in each of `--sizes` steps, up to `--mib`, with three replicas
and in ledgers of 64 MiB. At each step, a deep audit of all data runs as a separate process on two cores and is measured
from its start to its verdict. The last step also runs it on one core, and both again while a writer adds an entry of
1 KiB every 20 ms with an ack quorum of 2. The bookies share the cores.

MB/s: payload of all replicas, in 10^6 bytes. Memory: the maximum resident memory of all processes of the audit (Python,
JVM, workers); shared pages count for each process. CPU: of the audit and of the bookies, during the audit.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from peer_report import write_docs

COPIES = 3
"""Number of bookies, and of replicas of each entry."""
LEDGER_BYTES = 64 * 2**20
ADD_BYTES = 512 * 1024
"""Payload bytes of one `add_many`."""
FOREGROUND_PAUSE_S = 0.02
"""Pause in seconds between two adds of the concurrent writer."""
QUIET_S = 10.0
"""Duration in seconds of the measurement of the writer without an audit."""
POLL_S = 0.25
"""Interval in seconds at which memory and CPU time are sampled."""
MIB = 2**20
DOCS_MIB = 2_048
"""Payload in MiB of the last step with `--write-docs`."""
GROWTH_MIB = 256
"""Minimum growth in MiB between two audits from which a rate is computed. With less, start-up times dominate."""
TICKS = os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def fill(zookeeper: str, *, size: int, entry_size: int) -> int:
    """Write ledgers with `size` bytes of payload in total. Returns the number of entries."""
    store = await ZooKeeperStore.connect(zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom())
    step = max(1, ADD_BYTES // entry_size)
    total = 0
    for start in range(0, size, LEDGER_BYTES):
        handle = await client.create(ensemble_size=COPIES, write_quorum=COPIES, ack_quorum=2)
        for _ in range(max(1, min(LEDGER_BYTES, size - start) // (step * entry_size))):
            payload = os.urandom(entry_size)
            await handle.add_many([payload] * step)
            total += step
        await handle.close()
    await client.close()
    await store.close()
    return total


class Foreground:
    """A writer in its own thread; records the milliseconds of each add until `stop`."""

    def __init__(self, zookeeper: str) -> None:
        self._zookeeper = zookeeper
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()), daemon=True)
        self.latencies_ms: list[float] = []
        self._thread.start()

    async def _write(self) -> None:
        store = await ZooKeeperStore.connect(self._zookeeper)
        client = await LedgerClient.connect(store, randomness=random.SystemRandom())
        handle = await client.create(ensemble_size=COPIES, write_quorum=COPIES, ack_quorum=2)
        while not self._stopped.is_set():
            began = time.perf_counter()
            await handle.add(bytes(1024))
            self.latencies_ms.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(FOREGROUND_PAUSE_S)
        await handle.close()
        await client.delete(handle.ledger_id)
        await client.close()
        await store.close()

    def stop(self) -> tuple[float, float]:
        """p50 and p99 in milliseconds."""
        self._stopped.set()
        self._thread.join()
        cuts = quantiles(self.latencies_ms, n=100)
        return cuts[49], cuts[98]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one audit."""

    mib: int
    cores: int
    entries: int
    seconds: float
    memory_mib: float
    own_cpu_s: float
    bookies_cpu_s: float
    foreground: tuple[float, float] | None

    @property
    def bytes(self) -> int:
        return self.mib * MIB * COPIES


def stat_of(pid: int) -> tuple[int, float, int] | None:
    """(parent, CPU seconds including ended children, resident pages)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), sum(map(int, fields[11:15])) / TICKS, int(fields[21])


def family(root: int) -> list[tuple[int, float, int]]:
    """`stat_of` the process and all its descendants."""
    known = {
        int(p.name): stat for p in Path("/proc").iterdir() if p.name.isdecimal() and (stat := stat_of(int(p.name)))
    }
    inside = {root}
    while more := {pid for pid, stat in known.items() if stat[0] in inside and pid not in inside}:
        inside |= more
    return [known[pid] for pid in inside if pid in known]


def bookies_cpu_s(cluster: ThrowawayCluster) -> float:
    pids = (cluster.pid(f"bookie-{number}") for number in range(COPIES))
    return sum(stat[1] for pid in pids if (stat := stat_of(pid)))


def audit(
    cluster: ThrowawayCluster, out: Path, *, mib: int, entries: int, cores: int, rate: str, beside: bool
) -> Measured:
    """Run an audit and measure it. `beside`: with a concurrent writer."""
    foreground = Foreground(cluster.zookeeper) if beside else None
    before, began = bookies_cpu_s(cluster), time.perf_counter()
    command = [
        *(sys.executable, "-m", "bindery", "audit", "run", "--json", "--level", "deep", "--cores", str(cores)),
        *("--zookeeper", cluster.zookeeper, "--out", str(out), *(("--rate", rate) if rate else ())),
    ]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words)
        memory = cpu = 0.0
        while process.poll() is None:
            members = family(process.pid)
            memory = max(memory, sum(pages for _, _, pages in members) * os.sysconf("SC_PAGE_SIZE") / MIB)
            cpu = max(cpu, sum(each[1] for each in members))
            time.sleep(POLL_S)
        seconds = time.perf_counter() - began
        assert process.stdout is not None
        facts = json.loads(process.stdout.read() or b"{}")
        if process.returncode:
            words.seek(0)
            raise SystemExit(f"the audit ended with {process.returncode}:\n{words.read().decode(errors='replace')}")
    assert facts["copies"] >= COPIES * entries, facts
    latencies = foreground.stop() if foreground else None
    bookies = bookies_cpu_s(cluster) - before
    done = Measured(mib, cores, entries, seconds, memory, cpu, bookies, latencies)
    words_of = f"{seconds:.1f} s, {done.bytes / seconds / 1e6:.1f} MB/s, {memory:.0f} MiB"
    say(f"{mib} MiB x {COPIES} on {cores} cores: {words_of}, CPU {cpu:.1f} s and {bookies:.1f} s of the bookies")
    return done


def measure(given: argparse.Namespace) -> tuple[list[Measured], tuple[float, float] | None]:
    audits: list[Measured] = []
    quiet = None
    with ThrowawayCluster(bookies=COPIES, auditors=0) as cluster, tempfile.TemporaryDirectory() as directory:
        out, entries, there = Path(directory), 0, 0
        settings: dict[str, Any] = {"rate": given.rate, "out": out}
        for step in reversed(range(given.sizes)):
            mib = given.mib // 2**step
            began = time.perf_counter()
            entries += asyncio.run(fill(cluster.zookeeper, size=(mib - there) * MIB, entry_size=given.entry_size))
            say(f"wrote {mib - there} MiB x {COPIES} in {time.perf_counter() - began:.0f} s")
            there = mib
            audits.append(audit(cluster, mib=mib, entries=entries, cores=2, beside=False, **settings))
        if not given.only_audits:
            audits.append(audit(cluster, mib=there, entries=entries, cores=1, beside=False, **settings))
            alone = Foreground(cluster.zookeeper)
            time.sleep(QUIET_S)
            quiet = alone.stop()
            for cores in (1, 2):
                audits.append(audit(cluster, mib=there, entries=entries, cores=cores, beside=True, **settings))
    return audits, quiet


def render(audits: Iterable[Measured], quiet: tuple[float, float] | None, given: argparse.Namespace) -> str:
    audits = list(audits)
    lines = [
        f"{time.strftime('%-d %B %Y')}, {os.cpu_count()} cores, Python {platform.python_version()}; entries of "
        f"{given.entry_size:,} B, `--rate {given.rate or '(default)'}`.",
        "",
        "| payload | cores | seconds | copies/s | MB/s | MiB resident | CPU s audit | bookies | p50, p99 ms beside |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in audits:
        beside = "-" if one.foreground is None else f"{one.foreground[0]:.1f}, {one.foreground[1]:.1f}"
        copies_s = COPIES * one.entries / one.seconds
        lines.append(
            f"| {one.mib:,} MiB x {COPIES} | {one.cores} | {one.seconds:.1f} | {copies_s:,.0f} "
            f"| {one.bytes / one.seconds / 1e6:.1f} | {one.memory_mib:,.0f} | {one.own_cpu_s:.1f} "
            f"| {one.bookies_cpu_s:.1f} | {beside} |"
        )
    if quiet is not None:
        lines += ["", f"The same writer without an audit: p50 {quiet[0]:.1f} ms, p99 {quiet[1]:.1f} ms."]
    sizes = [one for one in audits if one.cores == 2 and one.foreground is None]
    low, high = sizes[0], sizes[-1]
    if high.mib - low.mib >= GROWTH_MIB and high.seconds > low.seconds:
        per_s = (high.bytes - low.bytes) / (high.seconds - low.seconds)
        goal_s = high.seconds + (10_240 * MIB * COPIES - high.bytes) / per_s
        grown = f"From the smallest to the largest, each second more reads {per_s / 1e6:.1f} MB more"
        lines += ["", f"{grown}; 10 GiB x {COPIES} would take {goal_s:.0f} s."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, help=f"payload of the last step (512; {DOCS_MIB} with --write-docs)")
    parser.add_argument("--sizes", type=int, default=3, help="number of steps")
    parser.add_argument("--entry-size", type=int, default=1024, help="bytes")
    parser.add_argument(
        "--rate", default="", help="bytes/s from one bookie, 20MiB/s for example; the command's default"
    )
    parser.add_argument("--only-audits", action="store_true", help="without the runs on one core and with a writer")
    parser.add_argument("--write-docs", action="store_true", help="update the table in docs/benchmarks.md")
    given = parser.parse_args()
    given.mib = given.mib or (DOCS_MIB if given.write_docs else 512)
    text = render(*measure(given), given)
    print(text)
    if given.write_docs:
        write_docs("bench-audit", text)


if __name__ == "__main__":
    main()
