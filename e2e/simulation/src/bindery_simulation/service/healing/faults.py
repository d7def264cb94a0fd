"""Faults of clusters with auditors: lost, drained and maintained bookies, and failures of auditors.

`Cluster.heal` undoes all of these faults except a lost disk and the draining of a bookie.
"""

from typing import Final

from bindery_simulation.service import faults
from bindery_simulation.service.bookie_machine import BookieMachine
from bindery_simulation.service.cluster import Cluster
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.healing.auditor_machine import AuditorMachine
from bindery_simulation.service.healing.plan import HealingKind, HealingPlan

METADATA_AWAY_S: Final = (0.3, 2.0, 6.0, 10.0)
"""Times in seconds after which an auditor's session is connected again."""


def lose_bookie(cluster: Cluster) -> None:
    """Lose a bookie and its disk permanently. Its cookie remains."""
    if cluster.healing is not None and cluster.healing.loses_disk and not cluster.is_disk_lost:
        bookie = _free_bookie(cluster)
        if bookie is not None:
            cluster.is_disk_lost = True
            bookie.lose()


def wipe_bookie(cluster: Cluster) -> None:
    """Replace the disk of a bookie by an empty one. The bookie starts in limbo and copies its entries back."""
    if cluster.healing is not None and cluster.healing.loses_disk and not cluster.is_disk_lost:
        bookie = _free_bookie(cluster)
        if bookie is not None:
            cluster.is_disk_lost = True
            bookie.wipe()
            cluster.later(cluster.rng.choice((0.5, 2.0, 9.0)), bookie.start)


def drain_bookie(cluster: Cluster) -> None:
    if cluster.healing is not None and cluster.healing.drains and not cluster.drained:
        bookie = _free_bookie(cluster)
        if bookie is not None:
            cluster.drain(bookie)


def maintain_bookie(cluster: Cluster) -> None:
    """Put a bookie into maintenance, stop it, and start it again after the lost-bookie delay."""
    bookie = _free_bookie(cluster)
    if bookie is not None:
        cluster.maintain(bookie, away_s=cluster.rng.choice((6.0, 10.0, 14.0)))


def _free_bookie(cluster: Cluster) -> BookieMachine | None:
    """Return a random serving bookie that the operator does not drain or maintain."""
    some = [bookie for bookie in cluster.bookies if bookie.is_serving and bookie.bookie_id not in cluster.reserved]
    return cluster.rng.choice(some) if some else None


def lose_for_a_while(cluster: Cluster) -> None:
    """Kill a bookie and start it some time after the lost-bookie delay."""
    assert cluster.healing is not None
    bookie = cluster.some_bookie()
    bookie.kill()
    cluster.later(cluster.healing.delay_s + cluster.rng.choice((5.0, 7.0, 10.0, 14.0)), bookie.start)


def away_within_the_delay(cluster: Cluster) -> None:
    """Kill a bookie and start it before it counts as lost."""
    bookie = cluster.some_bookie()
    bookie.kill()
    cluster.later(cluster.rng.choice((0.05, 1.0, 4.0, 6.0)), bookie.start)


def kill_auditor(cluster: Cluster) -> None:
    auditor = _some_auditor(cluster)
    auditor.kill()
    cluster.later(cluster.rng.choice((0.5, 2.0, 6.0)), auditor.start)


def stop_auditor(cluster: Cluster) -> None:
    """Send SIGTERM to an auditor."""
    _some_auditor(cluster).stop()


def pause_auditor(cluster: Cluster) -> None:
    """Pause an auditor. During the longer pauses its session expires, and another auditor leads and takes its locks."""
    auditor = _some_auditor(cluster)
    auditor.pause()
    cluster.later(cluster.rng.choice((1.0, 3.0, 5.0, 8.0)), auditor.resume)


def cut_auditor_from_metadata(cluster: Cluster) -> None:
    """Cut the connection between an auditor and the metadata, but not to bookies, so that it continues to copy."""
    auditor = _some_auditor(cluster)
    session, process = auditor.session, auditor.process
    if session is not None and process is not None and not process.is_paused:
        process.call_soon(cluster.tree.suspend_if_open, session)
        cluster.later(4.0, cluster.tree.time_out_if_away, session)
        cluster.later(cluster.rng.choice(METADATA_AWAY_S), process.call_soon, cluster.tree.resume, session)


def expire_auditor(cluster: Cluster) -> None:
    auditor = _some_auditor(cluster)
    if auditor.session is not None and auditor.process is not None and not auditor.process.is_paused:
        auditor.process.call_soon(cluster.tree.expire_if_open, auditor.session)


def lose_auditor_answers(cluster: Cluster) -> None:
    """Lose the answers to some metadata writes of an auditor."""
    auditor = _some_auditor(cluster)
    if auditor.session is not None:
        for _ in range(cluster.rng.randint(1, 4)):
            auditor.session.lose_next_write(applied=cluster.rng.random() < 0.5)


def partition_auditor(cluster: Cluster) -> None:
    """Cut the links between an auditor and some bookies, in both directions."""
    auditor = _some_auditor(cluster)
    for bookie in cluster.bookies:
        if cluster.rng.random() < 0.4:
            for source, target in ((auditor.name, bookie.name), (bookie.name, auditor.name)):
                cluster.network.block(source, target)
                cluster.later(cluster.rng.choice((0.5, 2.0, 6.0)), cluster.network.unblock, source, target)


def _some_auditor(cluster: Cluster) -> AuditorMachine:
    return cluster.rng.choice(cluster.auditors)


AUDITOR_FAULTS: Final[tuple[Fault, ...]] = (
    kill_auditor, stop_auditor, pause_auditor, pause_auditor, cut_auditor_from_metadata, cut_auditor_from_metadata,
    expire_auditor, lose_auditor_answers, partition_auditor,
)  # fmt: skip
RESTARTS_FAULTS: Final[tuple[Fault, ...]] = (away_within_the_delay, faults.stop_bookie, faults.kill_client)
RETURNS_FAULTS: Final[tuple[Fault, ...]] = (lose_for_a_while,)
STORM_FAULTS: Final[tuple[Fault, ...]] = (
    *AUDITOR_FAULTS, maintain_bookie, lose_for_a_while, lose_for_a_while,
    *(fault for fault in faults.FAULTS if fault is not faults.bit_rot),
)  # fmt: skip
"""Faults of clusters of kind STORM. `bit_rot` is left out, because an entry that is corrupt on every bookie counts as
lost until it is checked again."""
HEALING_FAULTS: Final[tuple[Fault, ...]] = tuple(
    dict.fromkeys((
        *AUDITOR_FAULTS, lose_bookie, wipe_bookie, drain_bookie, maintain_bookie, lose_for_a_while,
        away_within_the_delay,
    ))
)  # fmt: skip


def schedule(cluster: Cluster, plan: HealingPlan, given: tuple[Fault, ...] | None) -> list[tuple[float, Fault]]:
    """Return random (seconds from the start of the traffic, fault) pairs.

    `given`: the faults to choose from; None: the faults of the kind of cluster.
    """
    rng = cluster.rng
    if plan.kind is HealingKind.RESTARTS:
        kinds, count, until_s = RESTARTS_FAULTS, rng.randint(1, 4), 10.0
    elif plan.kind is HealingKind.RETURNS:
        kinds, count, until_s = RETURNS_FAULTS, rng.randint(1, 2), 4.0
    else:
        counts = (0, 1, 2, 3, 6) if given is None else (2, 3, 4)
        kinds, count, until_s = STORM_FAULTS, rng.choice(counts), plan.traffic_s - 1.0
    strikes = [(rng.uniform(0.5, until_s), rng.choice(given or kinds)) for _ in range(count)]
    if plan.loses_disk:
        strikes.append((rng.uniform(1.0, 4.0), rng.choice((lose_bookie, lose_bookie, wipe_bookie))))
    if plan.drains:
        strikes.append((rng.uniform(1.0, 6.0), drain_bookie))
    return strikes
