"""Weigh bundles and brokers in units, the one measure of load for choices and moves. Pure.

    weight(bundle) = BUNDLE_UNITS + messages/s in and out + bytes/s in and out / BYTES_PER_UNIT
                     + (topics + consumers + producers) / LOADED_PER_UNIT

A unit is about what one small message per second costs. The first term makes the numbers of bundles even where nothing
or little happens, and absorbs noise: rates that are small beside it move nothing. CPU and memory are reported, but do
not count: they also contain what a broker passes on, and follow a move late, which makes bundles go back and forth.

The weight of a broker is the sum over its bundles.
"""

from collections.abc import Iterable
from typing import Final

from bindery_broker.ownership.records import BrokerRecord, BundleLoad

BUNDLE_UNITS: Final = 10.0
"""Weight of a bundle without topics and messages."""
BYTES_PER_UNIT: Final = 10 * 1024
"""Bytes per second that weigh as much as one message per second."""
LOADED_PER_UNIT: Final = 10
"""Loaded topics, consumers and producers that weigh as much as one message per second."""

NO_LOAD: Final = BundleLoad()


def weight(load: BundleLoad) -> float:
    """Return the weight of a bundle, at least BUNDLE_UNITS."""
    return (
        BUNDLE_UNITS
        + load.msg_rate_in
        + load.msg_rate_out
        + (load.msg_throughput_in + load.msg_throughput_out) / BYTES_PER_UNIT
        + (load.topics + load.consumers + load.producers) / LOADED_PER_UNIT
    )


def total(loads: Iterable[BundleLoad]) -> BundleLoad:
    """Return the sum of loads."""
    rows = list(loads)
    if not rows:
        return NO_LOAD
    return BundleLoad(
        *(sum(getattr(one, name) for one in rows) for name in BundleLoad.__struct_fields__)  # in their order
    )


def weight_of(record: BrokerRecord) -> float:
    """Return the weight of a broker. Brokers of earlier versions do not report it: only their bundles count."""
    return record.weight or BUNDLE_UNITS * record.num_bundles
