"""Implement `bindery ledgers orphans`: print what `bindery_recovery.orphans` finds, and delete it on request."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from bindery_core.errors import BadRequest, BinderyError
from bindery_metadata.ledgers.known_ledgers import refuse_if_suspected
from bindery_pulsar.managed_ledger_codec import decode_cursor, decode_topic
from bindery_recovery.orphans import Fate, Finding, read_references, still_orphan, survey

from bindery.common import exit_codes
from bindery.common.operator import Cluster, now_ms, time_text
from bindery.common.output import print_json, print_table, report_error
from bindery.common.progress import Progress
from bindery.common.tables import size_text

REASONS: Final = {
    Fate.YOUNG: "younger than --older-than",
    Fate.UNCERTAIN: "possibly in use",
    Fate.UNREADABLE: "with unreadable metadata",
    Fate.FOREIGN: "of other applications (--all includes them)",
}
"""Reason why ledgers of a fate are not listed, for the summary."""


class BrokerCodec:
    """Read ledger ids from the metadata that brokers store in znodes."""

    def topic_ledgers(self, data: bytes) -> Iterable[int]:
        return [record.ledger_id for record in decode_topic(data).ledgers]

    def cursor_ledgers(self, data: bytes) -> Iterable[int]:
        """Return the ledger of the cursor, and each ledger that its position or a numeric property may refer to."""
        info = decode_cursor(data)
        found = {info.ledger_id}
        if info.state is not None:
            found.add(info.state.mark_delete.ledger_id)
            found.update(info.state.properties.values())
        return [ledger_id for ledger_id in found if ledger_id >= 0]


async def run_orphans(
    cluster: Cluster, *, delete: bool, yes: bool, older_than_s: float, everything: bool, as_json: bool
) -> int:
    """List the orphans, delete them if `delete` and `yes`, and return the exit code."""
    codec = BrokerCodec()
    live = Progress(is_quiet=as_json)
    wanted = {Fate.ORPHAN, Fate.FOREIGN} if everything else {Fate.ORPHAN}
    found: list[Finding] = []
    counts: Counter[Fate] = Counter()
    async for finding in survey(
        cluster.store, cluster.client, codec, now_ms=now_ms(), older_than_ms=round(older_than_s * 1000)
    ):
        counts[finding.fate] += 1
        live.show(f"{counts.total()} ledgers checked")
        if finding.fate in wanted:
            found.append(finding)
    live.clear()
    if found and delete and not everything and not (await read_references(cluster.store, codec)).topics:
        raise BadRequest(
            "this ZooKeeper has no topics, so every ledger appears to be an orphan. Check --zookeeper; to delete them "
            "nevertheless, pass --all"
        )
    _print_found(found, as_json=as_json)
    if not (delete and yes):
        _print_summary(found, counts, deleted=0, as_json=as_json, is_dry=True)
        if found and not as_json:
            print("no ledger was deleted; pass --delete --yes to delete them", file=sys.stderr)
        return exit_codes.FAILURE if delete and found else exit_codes.OK
    # A rolled-back ZooKeeper may lack the topics that refer to these ledgers.
    await refuse_if_suspected(cluster.store, cluster.layout, "no ledgers are deleted")
    deleted = failed = 0
    for finding in found:
        live.show(f"deleting: {deleted} of {len(found)}")
        try:
            if await still_orphan(cluster.store, codec, finding):
                await cluster.client.delete(finding.ledger_id)
                deleted += 1
        except BinderyError as error:
            failed += 1
            live.clear()
            report_error(f"ledger {finding.ledger_id} is not deleted: {error}", code=error.code, as_json=as_json)
    live.clear()
    _print_summary(found, counts, deleted=deleted, as_json=as_json, is_dry=False)
    return exit_codes.FAILURE if failed else exit_codes.OK


def _print_found(found: list[Finding], *, as_json: bool) -> None:
    if as_json:
        for finding in found:
            facts: dict[str, Any] = {
                "kind": "orphan",
                "ledger_id": int(finding.ledger_id),
                "fate": finding.fate.value,
                "why": finding.why,
                "application": finding.application,
                "topic": finding.topic,
                "created_ms": finding.created_ms,
                "state": finding.state,
                "bytes": finding.size,
                "custom": dict(finding.custom),
            }
            print_json(facts)
        return
    if found:
        print_table([_row(finding) for finding in found])


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "ledger": int(finding.ledger_id),
        "state": finding.state,
        "stored": "?" if finding.size is None else size_text(finding.size),
        "created": "?" if finding.created_ms is None else time_text(finding.created_ms),
        "why": finding.why,
    }


def _print_summary(found: list[Finding], counts: Counter[Fate], *, deleted: int, as_json: bool, is_dry: bool) -> None:
    size = sum(finding.size or 0 for finding in found)
    open_count = sum(finding.size is None for finding in found)
    if as_json:
        facts: dict[str, Any] = {
            "kind": "summary",
            "ledgers": counts.total(),
            "orphans": len(found),
            "bytes": size,
            "size_unknown": open_count,
            "deleted": deleted,
            "dry_run": is_dry,
            "fates": {fate.value: counts[fate] for fate in Fate},
        }
        print_json(facts)
        return
    unknown = f", plus {open_count} open ledgers of unknown size" if open_count else ""
    print(f"{len(found)} of {counts.total()} ledgers are orphans, {size_text(size)} in all copies{unknown}")
    unlisted = counts - Counter(finding.fate for finding in found)
    left = [f"{unlisted[fate]} {words}" for fate, words in REASONS.items() if unlisted[fate]]
    if left:
        print(f"not listed: {', '.join(left)}", file=sys.stderr)
    if not is_dry:
        print(f"deleted {deleted}; the bookies free the space with their next garbage collection")
