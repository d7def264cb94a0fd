"""Format the results of `peer.py` as Markdown tables, and insert tables into docs/benchmarks.md."""

from pathlib import Path
from typing import Any, Final

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
OURS: Final = "bindery"
TITLES: Final = {OURS: "Bindery", "apache": "Apache", "apache-eager": "Apache, eager", "apache-small": "Apache, small"}
PART_TITLES: Final = {
    "write": "Adds",
    "read": "Catch-up reads: a ledger of 50,000 entries in order, calls of up to 100, latency of the call",
    "tail": "Tail: from append to the entry in a second client's hands, 1,000 a second",
}


def render(result: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    machine = result["machine"]
    names = systems_of(result)
    lines = [
        f"{result['date']}, {machine['cores']} cores ({machine['arch']}), {machine['memory_gib']} GiB, Python "
        f"{machine['python']}; `{result['command']}`, {result['took_s']} s. A ratio above 1 is ours being better: "
        "entries/s ours ÷ theirs, p99 theirs ÷ ours.",
    ]
    for part, title in PART_TITLES.items():
        rows = [row for row in result["rows"] if row["part"] == part]
        if rows:
            lines += ["", f"**{title}.**", "", *_table(rows, names)]
    if result["starts"] or result["rss_after"]:
        lines += ["", "**Processes.**", "", *_processes(result, names)]
    behind = _behind(result, names)
    lines += ["", "Behind: " + ("; ".join(behind) if behind else "nothing") + "."]
    return "\n".join(lines)


def systems_of(result: dict[str, Any]) -> list[str]:
    """Names of the systems, Bindery first."""
    seen = dict.fromkeys([*result["starts"], *result["rss_idle"]])
    return sorted(seen, key=lambda name: list(TITLES).index(name))


def _table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    others = [name for name in names if name != OURS]
    with_ratios = OURS in names
    head = ["E/Qw/Qa", "wire", "bytes", "in flight"]
    head += [f"{TITLES[name]} /s" for name in names]
    head += [f"÷ {TITLES[name]}" for name in others] if with_ratios else []
    head += [f"p99 ms {TITLES[name]}" for name in names]
    head += [f"{TITLES[name]} ÷" for name in others] if with_ratios else []
    head += [f"µs CPU {TITLES[name]}" for name in names]
    table = [_line(head), "|---|---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        systems = row["systems"]
        cells = [row["quorum"], f"v{row['wire']}", f"{row['size']:,}", f"{row['in_flight']:,}"]
        cells += [f"{systems[name]['per_s']:,.0f}" for name in names]
        if with_ratios:
            cells += [_ratio(systems[OURS]["per_s"], systems[name]["per_s"]) for name in others]
        cells += [f"{systems[name]['p99_ms']:.2f}" for name in names]
        if with_ratios:
            cells += [_ratio(systems[name]["p99_ms"], systems[OURS]["p99_ms"]) for name in others]
        cells += [f"{systems[name]['cpu_us']:.1f}" for name in names]
        table.append(_line(cells))
    return table


def _processes(result: dict[str, Any], names: list[str]) -> list[str]:
    head = ["", *(TITLES[name] for name in names)]
    table = [_line(head), "|---|" + "---:|" * len(names)]
    if result["starts"]:
        starts = [sorted(result["starts"][name]) for name in names]
        table.append(
            _line(
                [
                    "exec to open port, s: median (slowest)",
                    *(f"{each[len(each) // 2]:.2f} ({each[-1]:.2f})" for each in starts),
                ]
            )
        )
    for title, of in (("idle", "rss_idle"), ("after", "rss_after")):
        if not result[of]:
            continue
        for quorum in next(iter(result[of].values())):
            if of == "rss_idle":
                cells = [f"{result[of][name][quorum]:,}" for name in names]
                table.append(_line([f"largest bookie's RSS, MiB, {quorum}, {title}", *cells]))
            else:
                for part in next(iter(result[of].values()))[quorum]:
                    cells = [f"{result[of][name][quorum][part]:,}" for name in names]
                    table.append(_line([f"largest bookie's RSS, MiB, {quorum}, {title} the lines of `{part}`", *cells]))
    return table


def _behind(result: dict[str, Any], names: list[str]) -> list[str]:
    """Rows in which another system is better than Bindery."""
    found = []
    for row in result["rows"]:
        systems = row["systems"]
        if OURS not in systems:
            continue
        ours = systems[OURS]
        for name in names:
            if name == OURS:
                continue
            worse = []
            if row["part"] != "tail" and ours["per_s"] < systems[name]["per_s"]:
                worse.append(f"{_ratio(ours['per_s'], systems[name]['per_s'])} of the entries/s")
            if ours["p99_ms"] > systems[name]["p99_ms"]:
                worse.append(f"p99 {_ratio(ours['p99_ms'], systems[name]['p99_ms'])} times")
            if worse:
                found.append(
                    f"{row['part']} {row['quorum']} v{row['wire']} {row['size']} B, {row['in_flight']} in flight, "
                    f"{TITLES[name]}: {', '.join(worse)}"
                )
    return found


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}" if below > 0 else "-"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_docs(name: str, text: str) -> None:
    """Insert `text` between the markers of `name`. Raises SystemExit if they are missing."""
    document = DOCUMENT.read_text()
    before, begin, rest = document.partition(f"<!-- {name}: begin")
    mark, closing, rest = rest.partition("-->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not (begin and closing and end):
        raise SystemExit(f"{DOCUMENT} has no markers for the tables of {name}")
    DOCUMENT.write_text(f"{before}{begin}{mark}{closing}\n\n{text}\n\n{end}{after}")
