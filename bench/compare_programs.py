"""Compare the benchmark programs of two checkouts in one run: storage, bookie, client and topic of `bench/run.py`.

    git worktree add ../before v0.1.0 && make -C ../before setup
    python bench/compare_programs.py ../before                           # all parts, 15 minutes
    python bench/compare_programs.py ../before --parts bookie --rounds 6 --seconds 1

Each round runs a program of both checkouts one after the other, and the next round in the other order. `speed` is the
operations per second now divided by before: the median over the rounds, and of the best measurement of each checkout.
`CPU us` is the processor time per operation of the measured process, the least of all rounds, as far as the program
prints it. A speed below 1 means that this checkout is slower. `bench/compare.py` compares the HTTP API.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from run import PARTS as PROGRAMS

HERE: Final = Path(__file__).resolve().parent.parent
TIMEOUT_S: Final = 900
_CLIENT: Final = re.compile(r"\s*(single|\d+ each)\s+(\d+)\s+(\d+)\s+(\d+)\s+[\d.]+\s+[\d.]+\s+([\d.]+)")
_TOPIC: Final = re.compile(r"(.*\S)\s+([\d.]+)")


class Measured(NamedTuple):
    per_s: float
    cpu_us: float | None = None


def bookie_rows(output: str) -> Iterator[tuple[str, Measured]]:
    for row in json.loads(output)["rows"]:
        yield f"{row['what']} {row['size']} B, {row['in_flight']} in flight", Measured(row["per_s"], row["cpu_us"])


def storage_rows(output: str) -> Iterator[tuple[str, Measured]]:
    head: list[str] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "adds/s" in cells or "reads/s" in cells:
            head = cells
        elif line.startswith("|") and set(line) - set("|-: "):
            kind = "adds" if "adds/s" in head else "reads"
            yield f"{kind}, {cells[0]}, {cells[1]} B", Measured(float(cells[2].replace(",", "")))


def client_rows(output: str) -> Iterator[tuple[str, Measured]]:
    for found in filter(None, map(_CLIENT.fullmatch, output.splitlines())):
        calls, in_flight, size, per_s, cpu_us = found.groups()
        yield f"{calls} {size} B, {in_flight} in flight", Measured(float(per_s), float(cpu_us))


def topic_rows(output: str) -> Iterator[tuple[str, Measured]]:
    for found in filter(None, map(_TOPIC.fullmatch, output.splitlines())):
        us = float(found[2])
        yield found[1], Measured(1e6 / us, us)


READERS: Final[dict[str, Callable[[str], Iterator[tuple[str, Measured]]]]] = {
    "storage": storage_rows,
    "bookie": bookie_rows,
    "client": client_rows,
    "topic": topic_rows,
}


def measure(tree: Path, part: str, words: list[str], seconds: float | None) -> dict[str, Measured]:
    """Run a program of a checkout, and return its rows by their names."""
    command = [str(tree / ".venv" / "bin" / "python"), str(tree / "bench" / words[0]), *words[1:]]
    command += ["--json"] if part == "bookie" else []
    command += [] if seconds is None or part == "topic" else ["--seconds", str(seconds)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    found = dict(READERS[part](done.stdout))
    if not found:
        raise SystemExit(f"no row was found in what {' '.join(command)} prints:\n{done.stdout[-2000:]}")
    return found


def compared(rounds: list[tuple[dict[str, Measured], dict[str, Measured]]]) -> Iterator[dict[str, Any]]:
    """Yield a line of the report per row that both checkouts have. `rounds`: before and now."""
    for name in rounds[0][0]:
        if not all(name in found for pair in rounds for found in pair):
            print(f"only one checkout has the row {name!r}", file=sys.stderr)
            continue
        before, now = [pair[0][name] for pair in rounds], [pair[1][name] for pair in rounds]
        best_before, best_now = (max(one.per_s for one in all_of) for all_of in (before, now))
        yield {
            "row": name,
            "per_s_before": round(statistics.median(one.per_s for one in before)),
            "per_s_now": round(statistics.median(one.per_s for one in now)),
            "speed": round(statistics.median(b.per_s / a.per_s for a, b in zip(before, now, strict=True)), 2),
            "speed_of_the_best": round(best_now / best_before, 2),
            "cpu_us_before": min((one.cpu_us for one in before if one.cpu_us is not None), default=None),
            "cpu_us_now": min((one.cpu_us for one in now if one.cpu_us is not None), default=None),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout, with its environment (`make setup`)")
    parser.add_argument("--parts", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--rounds", type=int, default=4, help="measurements per row and checkout (4)")
    parser.add_argument("--seconds", type=float, default=1, help="seconds per row (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    options = parser.parse_args()
    before = options.before.resolve()
    if not (before / ".venv" / "bin" / "python").exists():
        parser.error(f"{before} has no environment: run `make -C {before} setup`")
    report: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        for words in PROGRAMS[part]:
            rounds = []
            for number in range(options.rounds):
                print(f"{' '.join(words)}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
                order = [before, HERE] if number % 2 == 0 else [HERE, before]
                found = {tree: measure(tree, part, words, options.seconds) for tree in order}
                rounds.append((found[before], found[HERE]))
            report[" ".join(words)] = list(compared(rounds))
            if not options.json:
                print(
                    f"\n{' '.join(words)}\n\n| row | before /s | now /s | speed | of the best | CPU us before | now |"
                )
                print("|---|---:|---:|---:|---:|---:|---:|")
                for row in report[" ".join(words)]:
                    cells = (
                        "" if one is None else f"{one:,}" if type(one) is int else str(one) for one in row.values()
                    )
                    print("| " + " | ".join(cells) + " |", flush=True)
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
