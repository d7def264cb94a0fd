"""Compare the HTTP API of two checkouts in one run: produce and receive of `bench/broker.py`, alternating.

    git worktree add ../before v0.1.0 && make -C ../before setup
    python bench/compare.py ../before                   # "before" is the other checkout, "now" this one; 4 minutes
    python bench/compare.py ../before --rounds 24 --seconds 0.5 --connections 64 --batch 1

Both clusters run all the time, and only one of them is used at a time, for `--seconds` per row; each round changes the
order. A row shows the medians over all rounds. `speed` is messages/s now divided by before, the median over the pairs
of neighbouring measurements; `by CPU` is the same for messages per second of the broker's processor time, which other
programs of the machine affect less. A ratio below 1 means that this checkout is slower. The clients are those of this
checkout.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import broker
from bindery.standalone.throwaway import free_port_offset

HERE = Path(__file__).resolve().parent.parent
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BOOKIES = 3


class Measured(NamedTuple):
    messages_per_s: float
    cpu_us: float
    """Microseconds of the broker's processor time per message."""


class Checkout:
    """A cluster that runs the code of a checkout."""

    def __init__(self, tree: Path, data: Path) -> None:
        self._tree = tree
        self._data = data
        self.url = ""
        self._broker_pid = 0

    def _run(self, *words: str) -> str:
        command = [str(self._tree / ".venv" / "bin" / "bindery"), "standalone", *words]
        done = subprocess.run(command, cwd=self._tree, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        offset = free_port_offset(bookies=BOOKIES)
        ports = ("--port-offset", str(offset), "--bookies", str(BOOKIES))
        self._run("--data", str(self._data), *ports, "--detach")
        try:
            state = json.loads(self._run("status", "--data", str(self._data), "--json"))
            self.url = state["http"][0]
            self._broker_pid = next(one["pid"] for one in state["processes"] if one["kind"] == "broker")
            yield
        finally:
            self._run("stop", "--data", str(self._data))

    def cpu_s(self) -> float:
        """Return the processor time that the broker has used."""
        fields = Path(f"/proc/{self._broker_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    async def measure(self, step: broker.Step, **row: Any) -> Measured:
        before = self.cpu_s()
        found = await broker.run(self.url, step, **row)
        return Measured(found.messages_per_s, (self.cpu_s() - before) / max(1, found.messages) * 1e6)


Results = dict[tuple[str, int, int], list[dict[str, Measured]]]
"""By kind, connections and messages per request: the measurements of each round by checkout."""


async def compare(checkouts: dict[str, Checkout], options: argparse.Namespace) -> Results:
    results: Results = {}
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        order = list(checkouts.items())
        if number % 2:
            order.reverse()
        for connections in options.connections:
            for batch in options.batch:
                topic = f"public/default/compare-{number}-{connections}-{batch}"
                row = {"connections": connections, "per_request": batch, "size": options.size}
                pair: dict[str, dict[str, Measured]] = {"produce": {}, "receive+ack": {}}
                for name, checkout in order:
                    in_one_call = options.in_one_call and name == "now"
                    for kind, step in (
                        ("produce", broker.producing(topic, size=options.size, batch=batch)),
                        (
                            "receive+ack",
                            broker.receiving(topic, subscription="compare", batch=batch, in_one_call=in_one_call),
                        ),
                    ):
                        pair[kind][name] = await checkout.measure(step, what=kind, seconds=options.seconds, **row)
                    line = await broker.Connection.open(checkout.url)
                    await line.request("DELETE", f"/v1/topics/{topic}?force=true", b"")
                    await line.close()
                for kind, found in pair.items():
                    results.setdefault((kind, connections, batch), []).append(found)
    return results


def rows(results: Results) -> Iterator[dict[str, Any]]:
    for (kind, connections, batch), rounds in results.items():
        before, now = ([found[name] for found in rounds] for name in ("before", "now"))
        pairs = list(zip(before, now, strict=True))
        yield {
            "what": kind,
            "connections": connections,
            "messages_per_request": batch,
            "messages_per_s_before": round(statistics.median(one.messages_per_s for one in before)),
            "messages_per_s_now": round(statistics.median(one.messages_per_s for one in now)),
            "speed": round(statistics.median(b.messages_per_s / max(1.0, a.messages_per_s) for a, b in pairs), 2),
            "broker_cpu_us_before": round(statistics.median(one.cpu_us for one in before), 1),
            "broker_cpu_us_now": round(statistics.median(one.cpu_us for one in now), 1),
            "speed_by_cpu": round(statistics.median(a.cpu_us / max(0.1, b.cpu_us) for a, b in pairs), 2),
        }


def show(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"{options.size} B messages, {options.rounds} x {options.seconds:g} s per row, {platform.platform()}")
    print(
        f"{'':<12}{'conns':>6}{'msg/req':>8}{'before /s':>11}{'now /s':>9}{'speed':>7}{'CPU us before':>15}{'now':>8}"
        f"{'by CPU':>8}"
    )
    for row in found:
        what, connections, batch, before, now, speed, cpu_before, cpu_now, by_cpu = row.values()
        print(
            f"{what:<12}{connections:>6}{batch:>8}{before:>11,}{now:>9,}{speed:>7.2f}{cpu_before:>15}{cpu_now:>8}"
            f"{by_cpu:>8.2f}"
        )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout, with its environment (`make setup`)")
    parser.add_argument("--rounds", type=int, default=8, help="measurements per row and checkout (8)")
    parser.add_argument("--seconds", type=float, default=1, help="seconds per measurement (1)")
    parser.add_argument("--size", type=int, default=1024, help="payload bytes of a message (1024)")
    parser.add_argument("--batch", type=numbers, default=[1, 100], help="messages of a request (1,100)")
    parser.add_argument("--connections", type=numbers, default=[1, 8, 64], help="numbers of connections (1,8,64)")
    parser.add_argument(
        "--in-one-call", action="store_true", help="now: receive calls acknowledge the messages of the call before them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    before = options.before.resolve()
    if not (before / ".venv" / "bin" / "bindery").exists():
        parser.error(f"{before} has no environment: run `make -C {before} setup`")
    with tempfile.TemporaryDirectory(prefix="compare-") as root, contextlib.ExitStack() as stack:
        checkouts = {}
        for name, tree in (("before", before), ("now", HERE)):
            checkouts[name] = Checkout(tree, Path(root) / name)
            stack.enter_context(checkouts[name].running())
        found = list(rows(asyncio.run(compare(checkouts, options))))
    if options.json:
        json.dump({"machine": platform.platform(), "rows": found}, sys.stdout, indent=2)
        print()
    else:
        show(found, options)


if __name__ == "__main__":
    main()
