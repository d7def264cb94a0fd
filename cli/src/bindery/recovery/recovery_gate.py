"""Implement `bindery recovery gate`: check the cluster until it is ready for an upgrade, or until the timeout.

With `--only-drained` the gate serves a rollback: it refuses only if the rollback would remove a bookie that holds data.
Under-replicated ledgers and lost bookies do not prevent a rollback, because the rollback may be the fix. An unreachable
ZooKeeper does not prevent it either if `--bookies-now` shows that the rollback removes no bookie.
"""

import asyncio
import json
import sys
import time
from typing import Any, Final

from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_metadata.layout.layout import LedgersLayout
from bindery_recovery.draining.upgrade_gate import Refusal, Scale, Verdict, check_gate

from bindery.common.operator import connected_store, now_ms, parse_duration
from bindery.recovery.recovery_status import NoRandomness

FORCE: Final = "--force (of the Helm chart: --set upgradeGate.force=true) passes nevertheless"
FORCE_BACK: Final = "--force (of a rollback by Helm: --no-hooks) passes nevertheless"
PAUSE_S: Final = 2.0
"""Seconds between two checks. A refusal needs at least two checks, because a bookie may be registering."""


def run_gate(
    zookeeper: str,
    ledgers_root: str,
    *,
    bookies: int | None,
    id_template: str,
    wait: str,
    only_drained: bool,
    force: bool,
    as_json: bool,
    bookies_now: int | None = None,
) -> bool:
    """Print the result of the gate. Return True if it passed, or with `force`. Raises BadRequest."""
    if (bookies is None) != (not id_template):
        raise BadRequest("--bookies and --id-template need each other: together they name the bookies that stay")
    scale = None if bookies is None else Scale(bookies, id_template)
    if only_drained and scale is None:
        raise BadRequest("--only-drained needs --bookies and --id-template, which name the bookies that stay")
    verdict = asyncio.run(
        _check_until_open(
            zookeeper,
            LedgersLayout(ledgers_root),
            scale,
            wait_s=parse_duration(wait),
            only_drained=only_drained,
            bookies_now=bookies_now,
        )
    )
    may_pass = verdict.is_open or force
    if as_json:
        print(json.dumps(_facts(verdict, may_pass=may_pass)))
        return may_pass
    for note in verdict.notes:
        print(f"note: {note}")
    for refusal in verdict.refusals:
        print(f"{'passed by force' if force else 'refused'}: {refusal.text}; {refusal.fix}", file=sys.stderr)
    if verdict.is_open:
        print(f"passed: {_open(scale, only_drained=only_drained)}")
    elif not force:
        print(f"refused: nothing was changed; {FORCE_BACK if only_drained else FORCE}", file=sys.stderr)
    return may_pass


def _open(scale: Scale | None, *, only_drained: bool) -> str:
    """Return the conditions that the gate has checked, as text."""
    if scale is None:
        return "no ledger is marked and no bookie is lost"
    if only_drained:
        return f"only the {scale.bookies} bookies that stay hold data"
    return f"no ledger is marked, no bookie is lost, and {scale.bookies} bookies may stay"


async def _check_until_open(
    zookeeper: str,
    layout: LedgersLayout,
    scale: Scale | None,
    *,
    wait_s: float,
    only_drained: bool,
    bookies_now: int | None,
) -> Verdict:
    """Repeat the check until it passes or `wait_s` is over. Return the verdict of the last check."""
    none_goes = only_drained and scale is not None and bookies_now is not None and bookies_now <= scale.bookies
    ends_at = time.monotonic() + max(wait_s, PAUSE_S)
    while True:
        verdict = await _check(zookeeper, layout, scale, only_going=only_drained)
        if none_goes and [one.kind for one in verdict.refusals] == ["unreachable"]:
            return Verdict(notes=(f"{verdict.refusals[0].text}; none of {bookies_now} bookies is removed",))
        left_s = ends_at - time.monotonic()
        if verdict.is_open or left_s <= 0:
            return verdict
        await asyncio.sleep(min(PAUSE_S, left_s))


async def _check(zookeeper: str, layout: LedgersLayout, scale: Scale | None, *, only_going: bool) -> Verdict:
    """Check once, in a session of its own, because ZooKeeper may restart between two checks."""
    try:
        async with connected_store(zookeeper) as store:
            return await check_gate(
                store, layout, scale=scale, randomness=NoRandomness(), clock_ms=now_ms, only_going=only_going
            )
    except MetadataUnavailable as error:
        return Verdict((Refusal("unreachable", f"ZooKeeper is unreachable: {error}", "start ZooKeeper"),))


def _facts(verdict: Verdict, *, may_pass: bool) -> dict[str, Any]:
    reasons = [
        {"kind": one.kind, "bookie_id": one.bookie_id, "text": one.text, "fix": one.fix} for one in verdict.refusals
    ]
    return {"pass": may_pass, "open": verdict.is_open, "reasons": reasons, "notes": list(verdict.notes)}
