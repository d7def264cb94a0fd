"""Faults of a simulated cluster. A run injects some of them at random.

Each fault ends after some time, or when `Cluster.heal` undoes all faults at the end of the run.
"""

from collections.abc import Callable

from bindery_simulation.service.bookie_machine import BookieMachine
from bindery_simulation.service.cluster import Cluster
from bindery_simulation.service.machine import Machine

Fault = Callable[[Cluster], None]
"""A function that injects a fault. The name of the function identifies the fault."""


def kill_bookie(cluster: Cluster) -> None:
    bookie = cluster.some_bookie()
    bookie.kill()
    cluster.later(cluster.rng.choice((0.05, 1.0, 4.0)), bookie.start)


def cut_power(cluster: Cluster) -> None:
    _cut_power(cluster, cluster.some_bookie())


def cut_power_everywhere(cluster: Cluster) -> None:
    for bookie in cluster.bookies:
        _cut_power(cluster, bookie)


def _cut_power(cluster: Cluster, bookie: BookieMachine) -> None:
    """Cut the power between two disk operations, or after 0.3 s if the disk has too few operations until then."""
    if bookie.is_running:
        bookie.cut_power_within(cluster.rng.choice((0, 1, 2, 3, 5, 8, 20)))
    down_s = cluster.rng.choice((0.5, 2.0, 5.0))
    cluster.later(0.3, bookie.finish_power_cut)
    cluster.later(0.3 + down_s, bookie.start)


def stop_bookie(cluster: Cluster) -> None:
    """Send SIGTERM to a bookie."""
    cluster.some_bookie().stop()


def pause_bookie(cluster: Cluster) -> None:
    _pause(cluster, cluster.some_bookie())


def pause_client(cluster: Cluster) -> None:
    _pause(cluster, cluster.some_client())


def _pause(cluster: Cluster, machine: Machine) -> None:
    machine.pause()
    cluster.later(cluster.rng.choice((0.2, 1.0, 3.0, 7.0)), machine.resume)


def kill_client(cluster: Cluster) -> None:
    client = cluster.some_client()
    client.kill()
    cluster.later(1.0, client.start)


def partition(cluster: Cluster) -> None:
    """Cut the links between a bookie and some or all other machines, in one direction or both."""
    bookie = cluster.some_bookie()
    one_way = cluster.rng.random() < 0.4
    inward = cluster.rng.random() < 0.5
    for other in cluster.machines:
        if other is bookie or cluster.rng.random() < 0.3:
            continue
        ways = [(bookie.name, other.name), (other.name, bookie.name)]
        for source, target in ways[inward : inward + 1] if one_way else ways:
            cluster.network.block(source, target)
            cluster.later(cluster.rng.choice((0.5, 2.0, 6.0)), cluster.network.unblock, source, target)


def slow_link(cluster: Cluster) -> None:
    _slow_down(cluster, cluster.rng.choice((0.05, 0.3, 1.0)))


def _slow_down(cluster: Cluster, delay_s: float) -> None:
    bookie = cluster.some_bookie()
    for other in cluster.clients:
        for source, target in ((bookie.name, other.name), (other.name, bookie.name)):
            link = cluster.network.link(source, target)
            link.delay_s, link.jitter_s = delay_s, delay_s


def jitter_everywhere(cluster: Cluster) -> None:
    for source in cluster.machines:
        for target in cluster.machines:
            cluster.network.link(source.name, target.name).jitter_s = 0.1


def reset_connections(cluster: Cluster) -> None:
    cluster.network.reset_some(cluster.rng.choice((0.2, 0.5, 1.0)))


def flaky_connections(cluster: Cluster) -> None:
    """Let connections break in the middle of messages for a while."""
    cluster.network.reset_chance = cluster.rng.choice((0.01, 0.05))
    cluster.later(cluster.rng.choice((1.0, 4.0)), cluster.network.calm)


def slow_and_flaky(cluster: Cluster) -> None:
    """Slow down the links of one bookie, so that entries wait for it, and let connections break meanwhile."""
    _slow_down(cluster, cluster.rng.choice((0.02, 0.05, 0.1)))
    cluster.network.reset_chance = 0.1
    cluster.later(2.0, cluster.network.calm)


def disk_errors(cluster: Cluster) -> None:
    bookie = cluster.some_bookie()
    operations = cluster.rng.choice(
        (("datasync",), ("write_at",), ("read_at",), ("sync", "sync_directory"), ("kv.write_batch",), ("create",))
    )
    bookie.fail_disk(operations=operations, chance=cluster.rng.choice((0.1, 0.5, 1.0)), full=False)
    cluster.later(cluster.rng.choice((0.5, 3.0)), bookie.mend_disk)


def disk_full(cluster: Cluster) -> None:
    bookie = cluster.some_bookie()
    bookie.fail_disk(operations=("write_at", "create", "kv.write_batch"), chance=1.0, full=True)
    cluster.later(cluster.rng.choice((0.5, 3.0)), bookie.mend_disk)


def slow_disk(cluster: Cluster) -> None:
    bookie = cluster.some_bookie()
    bookie.slowness = cluster.rng.choice((20.0, 200.0, 2000.0))
    cluster.later(3.0, bookie.mend_disk)


def bit_rot(cluster: Cluster) -> None:
    """Let the first bookie return bodies with a flipped bit. Other bookies do not, so that intact replicas remain."""
    cluster.bookies[0].rot = cluster.rng.choice((0.3, 1.0))


def expire_session(cluster: Cluster) -> None:
    machine = cluster.some_machine()
    if machine.session is not None and machine.process is not None and not machine.process.is_paused:
        machine.process.call_soon(cluster.tree.expire_if_open, machine.session)


def suspend_session(cluster: Cluster) -> None:
    machine = cluster.some_machine()
    session, process = machine.session, machine.process
    if session is not None and process is not None and not process.is_paused:
        process.call_soon(cluster.tree.suspend_if_open, session)
        away_s = cluster.rng.choice((0.3, 2.0, 6.0))
        cluster.later(4.0, cluster.tree.time_out_if_away, session)
        cluster.later(away_s, process.call_soon, cluster.tree.resume, session)


def lose_metadata_answers(cluster: Cluster) -> None:
    """Lose the answers to some metadata writes of all clients."""
    for machine in cluster.clients:
        if machine.session is not None:
            for _ in range(cluster.rng.randint(1, 3)):
                machine.session.lose_next_write(applied=cluster.rng.random() < 0.5)


FAULTS: tuple[Fault, ...] = (
    kill_bookie, cut_power, cut_power, cut_power_everywhere, stop_bookie, pause_bookie, pause_client, kill_client,
    partition, partition, slow_link, jitter_everywhere, reset_connections, flaky_connections,
    flaky_connections, slow_and_flaky, slow_and_flaky, disk_errors, disk_full, slow_disk, bit_rot,
    expire_session, suspend_session, lose_metadata_answers,
)  # fmt: skip
