"""Faults of brokers, and the faults of bookies and networks that their runs use.

In runs with brokers, the clients of the cluster (`Cluster.clients`) are brokers.
"""

from typing import Final, cast

from bindery_broker.ownership.bundles import Bundle

from bindery_simulation.service import faults
from bindery_simulation.service.cluster import Cluster
from bindery_simulation.service.faults import Fault
from bindery_simulation.topics.broker_machine import BrokerMachine


def _some_broker(cluster: Cluster) -> BrokerMachine:
    """Return a broker; usually one that owns a topic."""
    brokers = [cast(BrokerMachine, machine) for machine in cluster.clients]
    owners = [one for one in brokers if one.gateway is not None and len(one.gateway.broker.topics)]
    return cluster.rng.choice(owners if owners and cluster.rng.random() < 0.8 else brokers)


def kill_broker(cluster: Cluster) -> None:
    """Kill a broker. Its bundles have no owner until its session has timed out."""
    broker = _some_broker(cluster)
    broker.kill()
    cluster.later(cluster.rng.choice((0.1, 2.0, 6.0)), broker.start)


def stop_broker(cluster: Cluster) -> None:
    """Send SIGTERM to a broker."""
    _some_broker(cluster).stop()


def close_topics(cluster: Cluster) -> None:
    """Let a broker close its topics. It may open them again."""
    _some_broker(cluster).close_topics()


def hand_over(cluster: Cluster) -> None:
    """Let a broker hand a bundle over, to another broker or to whoever is asked for it."""
    broker = _some_broker(cluster)
    bundle = _some_bundle(cluster, broker)
    if bundle is not None:
        others = [cast(BrokerMachine, machine) for machine in cluster.clients if machine is not broker]
        broker.hand_over(bundle, cluster.rng.choice((*others, None)))


def split_bundle(cluster: Cluster) -> None:
    """Let a broker split a bundle, and sometimes hand a part over."""
    broker = _some_broker(cluster)
    bundle = _some_bundle(cluster, broker)
    if bundle is not None:
        broker.split(bundle)
        if cluster.rng.random() < 0.5:
            cluster.later(cluster.rng.choice((0.0, 0.3, 2.0)), hand_over, cluster)


def _some_bundle(cluster: Cluster, broker: BrokerMachine) -> Bundle | None:
    """Return a bundle that the broker owns, usually one with topics that are open; None: it owns none."""
    if broker.broker is None or not broker.broker.ownership.held:
        return None
    held = sorted(broker.broker.ownership.held)
    used = sorted({broker.broker.ownership.divisions.known(topic.name) for topic in broker.broker.topics})
    return cluster.rng.choice(used if used and cluster.rng.random() < 0.9 else held)


def pause_broker(cluster: Cluster) -> None:
    """Pause a broker, sometimes beyond its session."""
    broker = _some_broker(cluster)
    broker.pause()
    cluster.later(cluster.rng.choice((0.5, 3.0, 5.0, 8.0)), broker.resume)


def expire_broker(cluster: Cluster) -> None:
    """End the session of a broker. The broker learns that at once, and serves on."""
    broker = _some_broker(cluster)
    if broker.session is not None and broker.process is not None and not broker.process.is_paused:
        broker.process.call_soon(cluster.tree.expire_if_open, broker.session)


def lose_session(cluster: Cluster) -> None:
    """Disconnect a broker from the metadata store until its session has ended there. It serves on as a stale owner."""
    _disconnect(cluster, (6.0, 9.0))


def suspend_session(cluster: Cluster) -> None:
    """Disconnect a broker from the metadata store for less than its session."""
    _disconnect(cluster, (0.3, 2.0, 3.5))


def _disconnect(cluster: Cluster, times_s: tuple[float, ...]) -> None:
    broker = _some_broker(cluster)
    session, process = broker.session, broker.process
    if session is not None and process is not None and not process.is_paused:
        process.call_soon(cluster.tree.suspend_if_open, session)
        cluster.later(4.0, cluster.tree.time_out_if_away, session)
        cluster.later(cluster.rng.choice(times_s), process.call_soon, cluster.tree.resume, session)


def cut_client(cluster: Cluster) -> None:
    """Cut the links between a broker and all clients of brokers, in one direction or both."""
    broker = _some_broker(cluster)
    ways = cluster.rng.choice(((True, True), (True, False), (False, True)))
    for client in cluster.callers:
        for is_cut, source, target in zip(ways, (broker.name, client), (client, broker.name), strict=True):
            if is_cut:
                cluster.network.block(source, target)
                cluster.later(cluster.rng.choice((0.5, 3.0)), cluster.network.unblock, source, target)


def cut_brokers(cluster: Cluster) -> None:
    """Cut the links between a broker and all other brokers, in one direction or both."""
    broker = _some_broker(cluster)
    ways = cluster.rng.choice(((True, True), (True, False), (False, True)))
    for other in cluster.clients:
        for is_cut, source, target in zip(ways, (broker, other), (other, broker), strict=True):
            if is_cut and other is not broker:
                cluster.network.block(source.name, target.name)
                cluster.later(cluster.rng.choice((0.5, 3.0)), cluster.network.unblock, source.name, target.name)


FAULTS: Final[tuple[Fault, ...]] = (
    kill_broker, kill_broker, kill_broker, stop_broker, close_topics, hand_over, hand_over, split_bundle, pause_broker,
    expire_broker, lose_session, lose_session, suspend_session, cut_client, cut_brokers, faults.lose_metadata_answers,
    faults.kill_bookie, faults.cut_power, faults.stop_bookie, faults.pause_bookie, faults.partition, faults.slow_link,
    faults.jitter_everywhere, faults.reset_connections, faults.flaky_connections, faults.slow_and_flaky,
    faults.slow_disk, faults.disk_errors,
)  # fmt: skip
