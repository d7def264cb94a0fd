"""`bindery-bookie-prestop`: before this bookie is stopped, say that it will be back.

What Kubernetes runs in the bookie's container before SIGTERM, with the bookie's environment (BOOKIE_...). It puts the
bookie into maintenance for `maintenance_s`: until then nobody copies what it holds. The bookie ends that itself once it
serves again; the lease ends by itself when it does not come back.

Probes that fail stop a container too, and this hook runs. A bookie that never gets to serve would be excused for ever,
so an absence is excused once, from its first stop on.

| found                                       | done                                         |
|---------------------------------------------|----------------------------------------------|
| nothing said                                | maintenance until now + `maintenance_s`      |
| a maintenance that ends sooner              | the same                                     |
| a maintenance that ends later               | nothing: an operator knows better            |
| its own of an earlier stop, over or not, and it is not registered | nothing: that absence goes on |
| joining, draining, removed                  | nothing: that counts for more                |
| no cookie: the cluster knows it not         | nothing                                      |
| ZooKeeper does not answer                   | nothing; the auditor's delay is what is left |

It ends within LIMIT_S and with exit code 0 whatever happens: nothing here is worth a stop that fails. What was done, or
why not, is one line on stderr.
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
"""Of all of it. The grace in which a pod is stopped begins with this hook."""
CONNECT_TIMEOUT_S: Final = 4.0
OPERATION_TIMEOUT_S: Final = 2.0
SESSION_TIMEOUT_S: Final = 4.0
ATTEMPTS_MAX: Final = 3
REASON: Final = "stopped in order"


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
        said = asyncio.run(_say(BookieSettings()))
    except (BinderyError, OSError, WrongSettings) as error:
        said = f"no maintenance was said: {error}; what this bookie holds is copied once the auditor's delay is over"
    sys.stderr.write(f"{PROGRAM}: {said}\n")
    sys.stderr.flush()
    return 0


def bookie_id_of(settings: BookieSettings) -> BookieId:
    """The id that a bookie with these settings has. Raises BadRequest where it hangs on a port that only it knows."""
    if not settings.bookie_id and not settings.port:
        raise BadRequest("the bookie's id is unknown: BOOKIE_PORT is 0; set BOOKIE_BOOKIE_ID")
    return settings.resolved_bookie_id(port=settings.port)


async def _say(settings: BookieSettings) -> str:
    bookie_id = bookie_id_of(settings)
    store = await ZooKeeperStore.connect(
        settings.zookeeper,
        session_timeout_s=SESSION_TIMEOUT_S,
        operation_timeout_s=OPERATION_TIMEOUT_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        return await begin_maintenance(
            store,
            LedgersLayout(settings.ledgers_root),
            bookie_id,
            now_ms=time.time_ns() // 1_000_000,  # noqa: TID251 - the process is put together here
            maintenance_s=settings.maintenance_s,
        )
    finally:
        await store.close()


async def begin_maintenance(
    store: MetadataStore, layout: LedgersLayout, bookie_id: BookieId, *, now_ms: int, maintenance_s: float
) -> str:
    """Do what the module's table says; the sentence that tells it. Raises BinderyError."""
    if maintenance_s == 0:
        return "no maintenance was asked for: BOOKIE_MAINTENANCE_S is 0"
    if await CookieStore(store, layout).read(bookie_id) is None:
        return f"{bookie_id} is not known to the cluster: it never served"
    memberships = MembershipStore(store, clock_ms=lambda: now_ms)
    until_ms = now_ms + round(maintenance_s * 1000)
    for _ in range(ATTEMPTS_MAX):
        current = await memberships.get(bookie_id)
        intent = current.effective(now_ms)
        if intent in (Intent.JOINING, Intent.DRAINING, Intent.REMOVED):
            return f"{bookie_id} is {intent.value}: that stays as it is"
        if intent is Intent.MAINTENANCE and (current.until_ms is None or current.until_ms >= until_ms):
            return f"{bookie_id} is in maintenance for longer already"
        is_own = current.intent is Intent.MAINTENANCE and current.by == str(bookie_id)
        if is_own and not await _is_registered(store, layout, bookie_id):
            return f"{bookie_id} has not served since its last stop, and its maintenance lease of then is unchanged"
        try:
            await memberships.set(
                bookie_id, Intent.MAINTENANCE, until_ms=until_ms, reason=REASON, by=str(bookie_id),
                version=current.version,
            )  # fmt: skip
        except VersionConflict:
            continue
        return f"{bookie_id} is in maintenance for {maintenance_s:g} s, or until it serves again"
    raise VersionConflict("the membership keeps changing", bookie_id=bookie_id)


async def _is_registered(store: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> bool:
    paths = (layout.bookie(bookie_id, read_only=read_only) for read_only in (False, True))
    return any([await store.exists(path) is not None for path in paths])


def _out_of_time(*_: object) -> None:
    sys.stderr.write(f"{PROGRAM}: no maintenance was said: {LIMIT_S:g} s were not enough\n")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
