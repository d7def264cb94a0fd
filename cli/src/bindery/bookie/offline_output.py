"""Format the output of commands that read the files of a bookie: warnings, dumped records, steps of a salvage."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from bindery_bookie.offline.places import ShardPlaces, running_on
from bindery_kit.observability import logs

_INDENTED: Final = frozenset({"record", "run"})


def dump_line(facts: dict[str, Any]) -> str:
    """Return one line of text: the kind of record, then its fields; damage in capitals."""
    what = facts["what"]
    words = [f"{name}={value}" for name, value in facts.items() if name not in ("what", "kind", "problem", "path")]
    head = facts.get("path") or facts.get("kind") or what
    indent = "  " if what in _INDENTED else ""
    text = f"{indent}{head} {' '.join(words)}".rstrip()
    return f"DAMAGED {text}: {facts['problem']}" if "problem" in facts else text


def step_lines(facts: dict[str, Any]) -> list[str]:
    """Return one step of a salvage as lines of text."""
    lines = [f"{facts['path']} at {facts['offset']}: {facts['problem']}"]
    if facts["moved_to"] is not None:
        did = "copied" if facts["is_copy"] else "moved"
        lines.append(f"  {did if facts['done'] else 'to be ' + did} to {facts['moved_to']}")
    lines.append(f"  the shard {'is' if facts['done'] else 'goes'} in{'' if facts['done'] else 'to'} limbo")
    return lines


def results_only() -> None:
    """Suppress warnings of the storage: stdout is for results, and the commands report damage themselves."""
    logs.configure(service="cli", level="error")


def warn_if_running(places: Sequence[ShardPlaces]) -> None:
    """Warn on stderr if a running bookie may change the files while they are read."""
    running = running_on(places)
    if running:
        print(f"{running}: entries that it stores at this moment may be missing here", file=sys.stderr)
