"""Faults: what the world does to a simulated cluster, each with its heal. Drawn by lot, told by name.

`world.heal` undoes all of them at the end of the run; faults that take long only undo themselves earlier.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from bindery_simulation.service.machine import BookieMachine, Machine

if TYPE_CHECKING:
    from bindery_simulation.service.world import World

Fault = Callable[["World"], None]


def kill_bookie(world: "World") -> None:
    bookie = world.some_bookie()
    bookie.kill()
    world.later(world.rng.choice((0.05, 1.0, 4.0)), bookie.start)


def cut_power(world: "World") -> None:
    _cut_power(world, world.some_bookie())


def cut_power_everywhere(world: "World") -> None:
    for bookie in world.bookies:
        _cut_power(world, bookie)


def _cut_power(world: "World", bookie: BookieMachine) -> None:
    """In the middle of the disk's work if there is any soon, else between."""
    if bookie.is_running:
        bookie.cut_power_within(world.rng.choice((0, 1, 2, 3, 5, 8, 20)))
    down_s = world.rng.choice((0.5, 2.0, 5.0))
    world.later(0.3, bookie.finish_power_cut)
    world.later(0.3 + down_s, bookie.start)


def stop_bookie(world: "World") -> None:
    """SIGTERM."""
    world.some_bookie().stop()


def pause_bookie(world: "World") -> None:
    _pause(world, world.some_bookie())


def pause_client(world: "World") -> None:
    _pause(world, world.some_client())


def _pause(world: "World", machine: Machine) -> None:
    machine.pause()
    world.later(world.rng.choice((0.2, 1.0, 3.0, 7.0)), machine.resume)


def kill_client(world: "World") -> None:
    client = world.some_client()
    client.kill()
    world.later(1.0, client.start)


def partition(world: "World") -> None:
    """A bookie and some or all of the others cannot talk, in one direction or both."""
    bookie = world.some_bookie()
    one_way = world.rng.random() < 0.4
    inward = world.rng.random() < 0.5
    for other in world.machines:
        if other is bookie or world.rng.random() < 0.3:
            continue
        ways = [(bookie.name, other.name), (other.name, bookie.name)]
        for source, target in ways[inward : inward + 1] if one_way else ways:
            world.network.block(source, target)
            world.later(world.rng.choice((0.5, 2.0, 6.0)), world.network.unblock, source, target)


def slow_link(world: "World") -> None:
    _slow_down(world, world.rng.choice((0.05, 0.3, 1.0)))


def _slow_down(world: "World", delay_s: float) -> None:
    bookie = world.some_bookie()
    for other in world.clients:
        for source, target in ((bookie.name, other.name), (other.name, bookie.name)):
            link = world.network.link(source, target)
            link.delay_s, link.jitter_s = delay_s, delay_s


def jitter_everywhere(world: "World") -> None:
    for source in world.machines:
        for target in world.machines:
            world.network.link(source.name, target.name).jitter_s = 0.1


def reset_connections(world: "World") -> None:
    world.network.reset_some(world.rng.choice((0.2, 0.5, 1.0)))


def flaky_connections(world: "World") -> None:
    """For a while connections break in the middle of what they carry."""
    world.network.reset_chance = world.rng.choice((0.01, 0.05))
    world.later(world.rng.choice((1.0, 4.0)), world.network.calm)


def slow_and_flaky(world: "World") -> None:
    """One bookie lags behind, so that entries wait for it, and meanwhile those that are ahead of it fail."""
    _slow_down(world, world.rng.choice((0.02, 0.05, 0.1)))
    world.network.reset_chance = 0.1
    world.later(2.0, world.network.calm)


def disk_errors(world: "World") -> None:
    bookie = world.some_bookie()
    operations = world.rng.choice(
        (("datasync",), ("write_at",), ("read_at",), ("sync", "sync_directory"), ("kv.write_batch",), ("create",))
    )
    bookie.fail_disk(operations=operations, chance=world.rng.choice((0.1, 0.5, 1.0)), full=False)
    world.later(world.rng.choice((0.5, 3.0)), bookie.mend_disk)


def disk_full(world: "World") -> None:
    bookie = world.some_bookie()
    bookie.fail_disk(operations=("write_at", "create", "kv.write_batch"), chance=1.0, full=True)
    world.later(world.rng.choice((0.5, 3.0)), bookie.mend_disk)


def slow_disk(world: "World") -> None:
    bookie = world.some_bookie()
    bookie.slowness = world.rng.choice((20.0, 200.0, 2000.0))
    world.later(3.0, bookie.mend_disk)


def bit_rot(world: "World") -> None:
    """One bookie gives back bodies with a bit flipped, as bad memory does; only ever one, copies must be left."""
    world.bookies[0].rot = world.rng.choice((0.3, 1.0))


def expire_session(world: "World") -> None:
    machine = world.some_machine()
    if machine.session is not None and machine.process is not None and not machine.process.is_paused:
        machine.process.call_soon(world.tree.expire_if_open, machine.session)


def suspend_session(world: "World") -> None:
    machine = world.some_machine()
    session, process = machine.session, machine.process
    if session is not None and process is not None and not process.is_paused:
        process.call_soon(world.tree.suspend_if_open, session)
        away_s = world.rng.choice((0.3, 2.0, 6.0))
        world.later(4.0, world.tree.time_out_if_away, session)
        world.later(away_s, process.call_soon, world.tree.resume, session)


def lose_metadata_answers(world: "World") -> None:
    """Writes whose outcome the writer does not learn."""
    for machine in world.clients:
        if machine.session is not None:
            for _ in range(world.rng.randint(1, 3)):
                machine.session.lose_next_write(applied=world.rng.random() < 0.5)


FAULTS: tuple[Fault, ...] = (
    kill_bookie, cut_power, cut_power, cut_power_everywhere, stop_bookie, pause_bookie, pause_client, kill_client,
    partition, partition, slow_link, jitter_everywhere, reset_connections, flaky_connections,
    flaky_connections, slow_and_flaky, slow_and_flaky, disk_errors, disk_full, slow_disk, bit_rot,
    expire_session, suspend_session, lose_metadata_answers,
)  # fmt: skip
