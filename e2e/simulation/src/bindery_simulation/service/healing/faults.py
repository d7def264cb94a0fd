"""Faults of worlds that heal: bookies that are lost, drained or away with leave, and auditors that go astray.

`world.heal` undoes what can be undone. What cannot: a disk that is gone, and the wish to drain a bookie.
"""

from typing import TYPE_CHECKING, Final

from bindery_simulation.service import faults
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.healing.plan import AuditorMachine, HealingKind, HealingPlan
from bindery_simulation.service.machine import BookieMachine

if TYPE_CHECKING:
    from bindery_simulation.service.world import World

METADATA_AWAY_S: Final = (0.3, 2.0, 6.0, 10.0)


def lose_bookie(world: "World") -> None:
    """With its disk, for good; its cookie stays."""
    if world.healing is not None and world.healing.loses_disk and not world.is_disk_lost:
        bookie = _undisturbed(world)
        if bookie is not None:
            world.is_disk_lost = True
            bookie.lose()


def wipe_bookie(world: "World") -> None:
    """It comes back with an empty disk, in limbo, and refills itself."""
    if world.healing is not None and world.healing.loses_disk and not world.is_disk_lost:
        bookie = _undisturbed(world)
        if bookie is not None:
            world.is_disk_lost = True
            bookie.wipe()
            world.later(world.rng.choice((0.5, 2.0, 9.0)), bookie.start)


def drain_bookie(world: "World") -> None:
    if world.healing is not None and world.healing.drains and not world.drained:
        bookie = _undisturbed(world)
        if bookie is not None:
            world.drain(bookie)


def maintain_bookie(world: "World") -> None:
    """An operator stops it with leave, and starts it again after the delay."""
    bookie = _undisturbed(world)
    if bookie is not None:
        world.maintain(bookie, away_s=world.rng.choice((6.0, 10.0, 14.0)))


def _undisturbed(world: "World") -> BookieMachine | None:
    """One of which nobody wants anything else."""
    some = [bookie for bookie in world.bookies if bookie.is_serving and bookie.bookie_id not in world.spoken_for]
    return world.rng.choice(some) if some else None


def lose_for_a_while(world: "World") -> None:
    """It is back some time after the delay."""
    assert world.healing is not None
    bookie = world.some_bookie()
    bookie.kill()
    world.later(world.healing.delay_s + world.rng.choice((5.0, 7.0, 10.0, 14.0)), bookie.start)


def away_within_the_delay(world: "World") -> None:
    """Its session ends, and it is registered again before it counts as lost."""
    bookie = world.some_bookie()
    bookie.kill()
    world.later(world.rng.choice((0.05, 1.0, 4.0, 6.0)), bookie.start)


def kill_auditor(world: "World") -> None:
    auditor = _some_auditor(world)
    auditor.kill()
    world.later(world.rng.choice((0.5, 2.0, 6.0)), auditor.start)


def stop_auditor(world: "World") -> None:
    """SIGTERM."""
    _some_auditor(world).stop()


def pause_auditor(world: "World") -> None:
    """It goes on as if nothing had been; after the longer pauses somebody else leads, and has its locks."""
    auditor = _some_auditor(world)
    auditor.pause()
    world.later(world.rng.choice((1.0, 3.0, 5.0, 8.0)), auditor.resume)


def cut_auditor_from_metadata(world: "World") -> None:
    """But not from bookies: it goes on copying."""
    auditor = _some_auditor(world)
    session, process = auditor.session, auditor.process
    if session is not None and process is not None and not process.is_paused:
        process.call_soon(world.tree.suspend_if_open, session)
        world.later(4.0, world.tree.time_out_if_away, session)
        world.later(world.rng.choice(METADATA_AWAY_S), process.call_soon, world.tree.resume, session)


def expire_auditor(world: "World") -> None:
    auditor = _some_auditor(world)
    if auditor.session is not None and auditor.process is not None and not auditor.process.is_paused:
        auditor.process.call_soon(world.tree.expire_if_open, auditor.session)


def lose_auditor_answers(world: "World") -> None:
    """Writes whose outcome the auditor does not learn."""
    auditor = _some_auditor(world)
    if auditor.session is not None:
        for _ in range(world.rng.randint(1, 4)):
            auditor.session.lose_next_write(applied=world.rng.random() < 0.5)


def partition_auditor(world: "World") -> None:
    """From some bookies, both ways."""
    auditor = _some_auditor(world)
    for bookie in world.bookies:
        if world.rng.random() < 0.4:
            for source, target in ((auditor.name, bookie.name), (bookie.name, auditor.name)):
                world.network.block(source, target)
                world.later(world.rng.choice((0.5, 2.0, 6.0)), world.network.unblock, source, target)


def _some_auditor(world: "World") -> AuditorMachine:
    return world.rng.choice(world.auditors)


AUDITOR_FAULTS: Final[tuple[Fault, ...]] = (
    kill_auditor, stop_auditor, pause_auditor, pause_auditor, cut_auditor_from_metadata, cut_auditor_from_metadata,
    expire_auditor, lose_auditor_answers, partition_auditor,
)  # fmt: skip
OF_RESTARTS: Final[tuple[Fault, ...]] = (away_within_the_delay, faults.stop_bookie, faults.kill_client)
OF_RETURNS: Final[tuple[Fault, ...]] = (lose_for_a_while,)
OF_STORM: Final[tuple[Fault, ...]] = (
    *AUDITOR_FAULTS, maintain_bookie, lose_for_a_while, lose_for_a_while,
    *(fault for fault in faults.FAULTS if fault is not faults.bit_rot),
)  # fmt: skip
"""Without `bit_rot`: what is corrupt wherever it is counts as lost until somebody looks into it."""
HEALING_FAULTS: Final[tuple[Fault, ...]] = tuple(
    dict.fromkeys((
        *AUDITOR_FAULTS, lose_bookie, wipe_bookie, drain_bookie, maintain_bookie, lose_for_a_while,
        away_within_the_delay,
    ))
)  # fmt: skip


def schedule(world: "World", plan: HealingPlan, given: tuple[Fault, ...] | None) -> list[tuple[float, Fault]]:
    """What strikes when, in seconds from the start of the traffic. `given`: draw from these alone."""
    rng = world.rng
    if plan.kind is HealingKind.RESTARTS:
        kinds, count, until_s = OF_RESTARTS, rng.randint(1, 4), 10.0
    elif plan.kind is HealingKind.RETURNS:
        kinds, count, until_s = OF_RETURNS, rng.randint(1, 2), 4.0
    else:
        counts = (0, 1, 2, 3, 6) if given is None else (2, 3, 4)
        kinds, count, until_s = OF_STORM, rng.choice(counts), plan.traffic_s - 1.0
    strikes = [(rng.uniform(0.5, until_s), rng.choice(given or kinds)) for _ in range(count)]
    if plan.loses_disk:
        strikes.append((rng.uniform(1.0, 4.0), rng.choice((lose_bookie, lose_bookie, wipe_bookie))))
    if plan.drains:
        strikes.append((rng.uniform(1.0, 6.0), drain_bookie))
    return strikes
