"""`bindery recovery gate`: look at the cluster until it is fit for an upgrade, or time is over.

With `--only-drained` it is asked for what a rollback must not do: take away bookies that hold something. What lacks
copies or is lost may be what the rollback is to heal. So may ZooKeeper: while it cannot be asked, a rollback passes
that takes no bookie away, as far as `--bookies-now` tells.
"""

import asyncio
import json
import sys
import time
from typing import Any, Final

from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_metadata.layout.layout import LedgersLayout
from bindery_recovery.draining.upgrade_gate import Refusal, Scale, Verdict, look

from bindery.common.operator import connected_store, now_ms, parse_duration
from bindery.recovery.recovery_status import ReadOnlyLots

FORCE: Final = "--force (of the Helm chart: --set upgradeGate.force=true) passes all the same"
FORCE_BACK: Final = "--force (of a rollback by Helm: --no-hooks) passes all the same"
PAUSE_S: Final = 2.0
"""Between two looks. A refusal needs two: a bookie may just be registering."""


def run_gate(
    zookeeper: str, ledgers_root: str, *, bookies: int | None, id_template: str, wait: str, only_drained: bool,
    force: bool, as_json: bool, bookies_now: int | None = None,
) -> bool:  # fmt: skip
    """Whether to go on, after it was said. Raises BadRequest."""
    if (bookies is None) != (not id_template):
        raise BadRequest("--bookies and --id-template go together: which bookies are to stay follows from both")
    scale = None if bookies is None else Scale(bookies, id_template)
    if only_drained and scale is None:
        raise BadRequest("--only-drained needs --bookies and --id-template: they say which bookies are to go")
    verdict = asyncio.run(
        _watch(
            zookeeper, LedgersLayout(ledgers_root), scale, wait_s=parse_duration(wait), only_drained=only_drained,
            bookies_now=bookies_now,
        )
    )  # fmt: skip
    may_pass = verdict.is_open or force
    if as_json:
        print(json.dumps(_facts(verdict, may_pass=may_pass)))
        return may_pass
    for note in verdict.notes:
        print(f"note: {note}")
    for refusal in verdict.refusals:
        print(f"{'passed by force' if force else 'refused'}: {refusal.text}; {refusal.fix}", file=sys.stderr)
    if verdict.is_open:
        print(f"go on: {_open(scale, only_drained=only_drained)}")
    elif not force:
        print(f"refused: nothing was changed; {FORCE_BACK if only_drained else FORCE}", file=sys.stderr)
    return may_pass


def _open(scale: Scale | None, *, only_drained: bool) -> str:
    """What is known of a cluster that may go on."""
    if scale is None:
        return "no ledger is marked and no bookie is lost"
    if only_drained:
        return f"no bookie but the {scale.bookies} that stay holds anything"
    return f"no ledger is marked, no bookie is lost, and {scale.bookies} bookies may stay"


async def _watch(
    zookeeper: str, layout: LedgersLayout, scale: Scale | None, *, wait_s: float, only_drained: bool,
    bookies_now: int | None,
) -> Verdict:  # fmt: skip
    """The last look: the first that refuses nothing, or the one when time is over."""
    none_goes = only_drained and scale is not None and bookies_now is not None and bookies_now <= scale.bookies
    ends_at = time.monotonic() + max(wait_s, PAUSE_S)
    while True:
        verdict = await _look(zookeeper, layout, scale, only_going=only_drained)
        if none_goes and [one.kind for one in verdict.refusals] == ["unreachable"]:
            return Verdict(notes=(f"{verdict.refusals[0].text}; of {bookies_now} bookies none goes",))
        left_s = ends_at - time.monotonic()
        if verdict.is_open or left_s <= 0:
            return verdict
        await asyncio.sleep(min(PAUSE_S, left_s))


async def _look(zookeeper: str, layout: LedgersLayout, scale: Scale | None, *, only_going: bool) -> Verdict:
    """In a session of its own: ZooKeeper may come and go meanwhile."""
    try:
        async with connected_store(zookeeper) as store:
            return await look(
                store, layout, scale=scale, randomness=ReadOnlyLots(), clock_ms=now_ms, only_going=only_going
            )
    except MetadataUnavailable as error:
        return Verdict((Refusal("unreachable", f"ZooKeeper cannot be asked: {error}", "start ZooKeeper"),))


def _facts(verdict: Verdict, *, may_pass: bool) -> dict[str, Any]:
    reasons = [
        {"kind": one.kind, "bookie_id": one.bookie_id, "text": one.text, "fix": one.fix} for one in verdict.refusals
    ]
    return {"pass": may_pass, "open": verdict.is_open, "reasons": reasons, "notes": list(verdict.notes)}
