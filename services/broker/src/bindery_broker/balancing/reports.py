"""Decide when the load of a broker is reported, and with which bundles. Pure.

A report is stored if the number of bundles or `draining` has changed, if the weight has changed by some percent, or
after a maximum time. So constant load costs one write a minute, and all others of the cluster read it once.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from bindery_broker.balancing.weights import total, weight
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.records import BrokerRecord, BundleLoad, Usage

BUNDLES_MAX: Final = 1000
"""Maximum number of bundles in a report, some 80 bytes each: those with the most load. The others do not move."""


def report(
    base: BrokerRecord,
    loads: Mapping[Bundle, BundleLoad],
    *,
    cpu: Usage,
    memory: Usage,
    draining: bool,
    wall_ms: int,
) -> BrokerRecord:
    """Return the record of a broker with its load. `base`: its addresses."""
    sum_ = total(loads.values())
    weights = {bundle: weight(load) for bundle, load in loads.items()}
    heaviest = sorted(weights, key=lambda bundle: (-weights[bundle], bundle))[:BUNDLES_MAX]
    return msgspec.structs.replace(
        base,
        cpu=cpu,
        memory=memory,
        msg_rate_in=round(sum_.msg_rate_in, 3),
        msg_rate_out=round(sum_.msg_rate_out, 3),
        msg_throughput_in=round(sum_.msg_throughput_in, 3),
        msg_throughput_out=round(sum_.msg_throughput_out, 3),
        last_update=wall_ms,
        num_topics=sum_.topics,
        num_bundles=len(loads),
        num_consumers=sum_.consumers,
        num_producers=sum_.producers,
        draining=draining,
        weight=round(sum(weights.values()), 3),
        bindery_bundles={str(bundle): loads[bundle] for bundle in heaviest},
    )


def must_store(
    new: BrokerRecord, stored: BrokerRecord | None, *, change: float, age_s: float, age_s_max: float
) -> bool:
    """Return whether a report is stored. `stored`: the last one; None: there is none. `change`: part of the weight by
    which it must have changed. `age_s`: seconds since the last one was stored."""
    if stored is None or age_s >= age_s_max:
        return True
    if new.num_bundles != stored.num_bundles or new.draining != stored.draining:
        return True
    if new.bindery_bundles.keys() != stored.bindery_bundles.keys():
        return True
    return abs(new.weight - stored.weight) > change * max(stored.weight, 1.0)
