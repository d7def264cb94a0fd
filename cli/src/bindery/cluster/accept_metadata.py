"""Implement `bindery cluster accept-metadata`: show what bookies report, and accept the metadata on request."""

import sys
from collections.abc import Mapping
from typing import Any, Final

from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.ledgers.known_ledgers import SUSPECTED, KnownLedgersStore, RollbackReport
from bindery_metadata.recovery.accept_metadata import accept_metadata

from bindery.common import exit_codes
from bindery.common.operator import Cluster, now_ms, operator_name, time_text
from bindery.common.output import emit
from bindery.common.tables import table

COLUMNS: Final = ("bookie", "since", "unknown", "first", "last", "ids protected", "missing")


async def run_accept(cluster: Cluster, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Print the reports, accept the metadata if `yes` and not `dry_run`, and return the exit code.

    Raises Conflict if the reports changed meanwhile; nothing is accepted then.
    """
    cookies = CookieStore(cluster.store, cluster.layout)
    instance_id = await cookies.instance_id()
    await cluster.store.sync(cluster.layout.root)
    known, version = await KnownLedgersStore(cluster.store, instance_id=instance_id).read()
    if not known.reports:
        emit({"state": "ok", "accepted": False}, "no bookie suspects a rollback of the metadata", as_json=as_json)
        return exit_codes.OK
    silent = sorted({str(bookie_id) for bookie_id in await cookies.bookies()} - known.reports.keys())
    is_accepted = yes and not dry_run
    if is_accepted:
        await accept_metadata(
            cluster.store, instance_id=instance_id, version=version, by=operator_name(), at_ms=now_ms()
        )
    emit(
        _facts(known.reports, silent, is_accepted=is_accepted),
        _lines(known.reports, silent, is_accepted=is_accepted),
        as_json=as_json,
    )
    if is_accepted or dry_run:
        return exit_codes.OK
    if not as_json:
        print("nothing was accepted; --yes lets the bookies delete these ledgers for good", file=sys.stderr)
    return exit_codes.FAILURE


def _facts(reports: Mapping[str, RollbackReport], silent: list[str], *, is_accepted: bool) -> dict[str, Any]:
    return {
        "state": "ok" if is_accepted else SUSPECTED,
        "accepted": is_accepted,
        "bookies": [
            {
                "bookie_id": bookie,
                "since_ms": report.found_ms,
                "unknown": report.unknown,
                "first_ledger_id": report.first if report.unknown else None,
                "last_ledger_id": report.last if report.unknown else None,
                "ids_protected": report.ids_protected,
                "missing": report.missing,
            }
            for bookie, report in sorted(reports.items())
        ],
        "unreported": silent,
    }


def _lines(reports: Mapping[str, RollbackReport], silent: list[str], *, is_accepted: bool) -> list[str]:
    rows = [
        {
            "bookie": bookie,
            "since": time_text(report.found_ms),
            "unknown": report.unknown,
            "first": report.first if report.unknown else "",
            "last": report.last if report.unknown else "",
            "ids protected": ("yes" if report.ids_protected else "NO") if report.unknown else "",
            "missing": "not counted yet" if report.missing is None else report.missing,
        }
        for bookie, report in sorted(reports.items())
    ]
    lines = [
        *table(rows, columns=COLUMNS),
        "unknown: ledgers that this metadata never knew. missing: all stored ledgers that it does not contain",
    ]
    if silent:
        lines.append(f"no report from {', '.join(silent)}: what they store without metadata is deleted too")
    if is_accepted:
        lines.append(
            "accepted: the bookies delete these ledgers with their next garbage collection (`bindery bookie gc run`)"
        )
    return lines
