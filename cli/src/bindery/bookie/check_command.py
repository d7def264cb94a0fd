"""`bindery bookie check`: check all shards, print each finding as soon as it is made, then the verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from bindery_bookie.offline.check import ShardCheck, work_size
from bindery_bookie.offline.findings import DAMAGE, DEAD, NOTE
from bindery_bookie.offline.places import bookie_of, find_places, pair_places, running_pid
from bindery_core.errors import Conflict

from bindery.bookie.offline_output import results_only
from bindery.common.progress import Progress

_KIB: Final = 1024


class BookieRuns(Conflict):
    """A bookie writes to these files."""

    code = "bookie_runs"


def run_check(directories: Sequence[str], *, as_json: bool) -> bool:
    """Print findings and the verdict. Return True if no shard is damaged. Raises BookieRuns, BadRequest, OSError."""
    results_only()
    shards = pair_places(find_places(directories))
    for shard in shards:
        pid = None if shard.ledgers is None else running_pid(shard.ledgers)
        if pid is not None and shard.ledgers is not None:
            raise BookieRuns(
                f"{bookie_of(pid)} runs on {shard.ledgers.path}: stop it, or check a copy. To see what a running "
                "bookie verified itself, run `bindery bookie scrub state`"
            )
    progress = Progress(max(1, sum(map(work_size, shards)) // _KIB), "KiB")
    done = 0
    counts = {DAMAGE: 0, DEAD: 0, NOTE: 0}
    fix = ""

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress.update(done // _KIB)

    checks = [ShardCheck(shard, advance=advance) for shard in shards]
    for check in checks:
        for finding in check.run():
            progress.clear()
            counts[finding.severity] += 1
            print(json.dumps(finding.as_json()) if as_json else finding.line(last_fix=fix))
            fix = finding.fix
    progress.clear()
    parts = [asdict(check.totals) for check in checks]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    damaged = counts[DAMAGE]
    if as_json:
        summary = {
            "verdict": "damaged" if damaged else "sound",
            "damage": damaged,
            "dead": counts[DEAD],
            "notes": counts[NOTE],
        }
        print(json.dumps(summary | {"shards": len(checks)} | totals))
        return not damaged
    checked = (
        f"{totals['journal_groups']} journal groups, {totals['logs']} entry logs with {totals['records']} records, "
        f"{totals['ledgers']} ledgers with {totals['entries']} entries in the index"
    )
    if totals["dead_records"]:
        checked += f", {totals['dead_records']} records of deleted ledgers"
    if counts[DEAD]:
        checked += f", {counts[DEAD]} damaged places without live entries"
    is_whole = all(shard.journal is not None for shard in shards)
    sound = "sound" if is_whole else "sound, except the journal, which was not checked"
    print(f"{f'DAMAGED in {damaged} places' if damaged else sound}: {checked}")
    return not damaged
