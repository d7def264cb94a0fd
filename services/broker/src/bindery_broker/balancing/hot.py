"""Find the bundles that are split because they are hot. Pure.

Each owner splits its own hot bundles, between the two topics in the middle, and keeps the parts: they stay open. The
leader moves parts to other brokers if their load is uneven. A bundle with fewer than two topics is left as it is,
because one topic cannot be divided.
Source: Pulsar BundleSplitterTask.
"""

from collections.abc import Iterable, Mapping

from bindery_broker.balancing.settings import BalancingSettings
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.records import BundleLoad


def reason(load: BundleLoad, limits: BalancingSettings) -> str | None:
    """Return the limit that a bundle exceeds, for the log; None: it is not split."""
    if load.topics < 2:
        return None
    sessions = load.consumers + load.producers
    messages = load.msg_rate_in + load.msg_rate_out
    size = load.msg_throughput_in + load.msg_throughput_out
    for name, value, limit in (
        ("topics", load.topics, limits.split_topics),
        ("sessions", sessions, limits.split_sessions),
        ("messages_rate", messages, limits.split_messages_rate),
        ("bytes_rate", size, limits.split_bytes_rate),
    ):
        if value > limit:
            return f"{name} {value:.0f} above {limit:.0f}"
    return None


def hot(
    loads: Mapping[Bundle, BundleLoad], limits: BalancingSettings, *, resting: Iterable[Bundle] = ()
) -> dict[Bundle, str]:
    """Return the bundles to split, with the reasons. `resting`: bundles that were split or tried a short time ago."""
    left = set(loads) - set(resting)
    return {bundle: why for bundle in sorted(left) if (why := reason(loads[bundle], limits)) is not None}
