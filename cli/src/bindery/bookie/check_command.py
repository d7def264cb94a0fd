"""`bindery bookie check`: the checks of all shards, their findings as they come, and the verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from bindery_core.errors import Conflict

from bindery.bookie.check import DAMAGE, ShardCheck, work_size
from bindery.bookie.places import bookie_of, find_places, pair_places, running_pid
from bindery.common.progress import Progress

_KIB: Final = 1024


class BookieRuns(Conflict):
    """A bookie writes to these files."""

    code = "bookie_runs"


def run_check(directories: Sequence[str], *, as_json: bool) -> bool:
    """Print findings and the verdict; whether all is sound. Raises BookieRuns, BadRequest, OSError."""
    shards = pair_places(find_places(directories))
    for shard in shards:
        pid = None if shard.ledgers is None else running_pid(shard.ledgers)
        if pid is not None and shard.ledgers is not None:
            raise BookieRuns(
                f"{bookie_of(pid)} runs on {shard.ledgers.path}: stop it, or check a copy; what it verifies itself "
                "while it runs says `bindery bookie scrub state`"
            )
    progress = Progress(max(1, sum(map(work_size, shards)) // _KIB), "KiB")
    done = damaged = notes = 0
    fix = ""

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress.update(done // _KIB)

    checks = [ShardCheck(shard, advance=advance) for shard in shards]
    for check in checks:
        for finding in check.run():
            progress.clear()
            damaged += finding.severity == DAMAGE
            notes += finding.severity != DAMAGE
            print(json.dumps(finding.as_json()) if as_json else finding.line(last_fix=fix))
            fix = finding.fix
    progress.clear()
    parts = [asdict(check.totals) for check in checks]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    if as_json:
        summary = {"verdict": "damaged" if damaged else "sound", "damage": damaged, "notes": notes}
        print(json.dumps(summary | {"shards": len(checks)} | totals))
        return not damaged
    looked = (
        f"{totals['journal_groups']} journal groups, {totals['logs']} entry logs with {totals['records']} records, "
        f"{totals['ledgers']} ledgers with {totals['entries']} entries in the index"
    )
    if totals["dead_records"]:
        looked += f", {totals['dead_records']} records of deleted ledgers"
    sound = "sound" if all(shard.journal is not None for shard in shards) else "sound, but for the journal, not checked"
    print(f"{'DAMAGED in ' + str(damaged) + ' places' if damaged else sound}: {looked}")
    return not damaged
