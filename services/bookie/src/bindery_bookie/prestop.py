"""`bindery-bookie-prestop`: put a bookie into maintenance before a planned stop.

Kubernetes runs this in the bookie's container before SIGTERM, with the bookie's environment (BOOKIE_...). During the
`maintenance_s` that follow, the entries of the bookie are not re-replicated. The bookie ends the maintenance when it
serves again; if it does not return, the maintenance expires.

This hook also runs when a failing probe stops the container. A bookie that never serves could then renew its
maintenance forever, so only the first stop of an absence starts one.

| state of the bookie                                          | action                                      |
|--------------------------------------------------------------|---------------------------------------------|
| active                                                       | maintenance until now + `maintenance_s`     |
| in maintenance that ends earlier                             | the same                                    |
| in maintenance that ends later                               | none: an operator set it                    |
| its own maintenance of an earlier stop, even an expired one, | none: that absence continues                |
| and it is not registered                                     |                                             |
| joining, draining, removed                                   | none: these take precedence                 |
| no cookie: the cluster does not have this bookie             | none                                        |
| ZooKeeper does not answer                                    | none: only the auditor's delay applies      |

The hook ends within LIMIT_S and with exit code 0 in every case, because a stop must not fail. One line on stderr
reports the result.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from bindery_core.errors import BadRequest, BinderyError, VersionConflict
from bindery_core.ids import BookieId
from bindery_kit.configuration.settings import WrongSettings
from bindery_kit.observability import logs
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.zookeeper import ZooKeeperStore

from bindery_bookie.settings import BookieSettings

PROGRAM: Final = "bindery-bookie-prestop"
LIMIT_S: Final = 9.0
"""Maximum seconds of the whole hook, which is a part of the pod's grace period."""
CONNECT_TIMEOUT_S: Final = 4.0
"""Time limit in seconds for the connection to ZooKeeper."""
OPERATION_TIMEOUT_S: Final = 2.0
"""Time limit in seconds for one request to ZooKeeper."""
SESSION_TIMEOUT_S: Final = 4.0
"""Timeout in seconds of the ZooKeeper session."""
ATTEMPTS_MAX: Final = 3
"""Maximum number of attempts to set the membership if other writers change it at the same time."""
REASON: Final = "stopped in order"
"""Reason recorded with the maintenance."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    words = sys.argv[1:] if argv is None else argv
    if words:
        sys.stdout.write(__doc__ or "")
        return 0
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        logs.configure(service=PROGRAM, level="error")
        result = asyncio.run(_set_maintenance(BookieSettings()))
    except (BinderyError, OSError, WrongSettings) as error:
        result = f"maintenance not set: {error}; this bookie's entries are re-replicated after the auditor's delay"
    sys.stderr.write(f"{PROGRAM}: {result}\n")
    sys.stderr.flush()
    return 0


def bookie_id_of(settings: BookieSettings) -> BookieId:
    """Return the bookie id by these settings. Raises BadRequest if it depends on a port that the bookie chooses."""
    if not settings.bookie_id and not settings.port:
        raise BadRequest("the bookie's id is unknown: BOOKIE_PORT is 0; set BOOKIE_BOOKIE_ID")
    return settings.resolved_bookie_id(port=settings.port)


async def _set_maintenance(settings: BookieSettings) -> str:
    bookie_id = bookie_id_of(settings)
    store = await ZooKeeperStore.connect(
        settings.zookeeper,
        session_timeout_s=SESSION_TIMEOUT_S,
        operation_timeout_s=OPERATION_TIMEOUT_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        access=settings.zookeeper_access.load(),
    )
    try:
        return await begin_maintenance(
            store,
            LedgersLayout(settings.ledgers_root),
            bookie_id,
            now_ms=time.time_ns() // 1_000_000,  # noqa: TID251 - this is a composition root
            maintenance_s=settings.maintenance_s,
        )
    finally:
        await store.close()


async def begin_maintenance(
    store: MetadataStore, layout: LedgersLayout, bookie_id: BookieId, *, now_ms: int, maintenance_s: float
) -> str:
    """Apply the table of the module, and return a sentence about the result. Raises BinderyError."""
    if maintenance_s == 0:
        return "maintenance not set: BOOKIE_MAINTENANCE_S is 0"
    if await CookieStore(store, layout).read(bookie_id) is None:
        return f"maintenance not set: {bookie_id} has no cookie in the cluster, so it never served"
    memberships = MembershipStore(store, clock_ms=lambda: now_ms)
    until_ms = now_ms + round(maintenance_s * 1000)
    for _ in range(ATTEMPTS_MAX):
        current = await memberships.get(bookie_id)
        intent = current.effective(now_ms)
        if intent in (Intent.JOINING, Intent.DRAINING, Intent.REMOVED):
            return f"maintenance not set: {bookie_id} is {intent.value}, which takes precedence"
        if intent is Intent.MAINTENANCE and (current.until_ms is None or current.until_ms >= until_ms):
            return f"{bookie_id} is already in maintenance that ends later"
        is_own = current.intent is Intent.MAINTENANCE and current.by == str(bookie_id)
        if is_own and not await _is_registered(store, layout, bookie_id):
            return f"{bookie_id} has not served since its last stop; its maintenance of that stop is unchanged"
        try:
            await memberships.set(
                bookie_id,
                Intent.MAINTENANCE,
                until_ms=until_ms,
                reason=REASON,
                by=str(bookie_id),
                version=current.version,
            )
        except VersionConflict:
            continue
        return f"{bookie_id} is in maintenance for {maintenance_s:g} s, or until it serves again"
    raise VersionConflict("the membership keeps changing", bookie_id=bookie_id)


async def _is_registered(store: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> bool:
    paths = (layout.bookie(bookie_id, read_only=read_only) for read_only in (False, True))
    return any([await store.exists(path) is not None for path in paths])


def _out_of_time(*_: object) -> None:
    sys.stderr.write(f"{PROGRAM}: maintenance not set: it took longer than {LIMIT_S:g} s\n")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
