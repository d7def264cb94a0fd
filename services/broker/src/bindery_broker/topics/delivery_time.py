"""Limit the delays that producers may ask for. Pure.

A delivery time that is not in the future is no delay, whatever the limit. A longer delay than allowed is refused and
never shortened, because a message that is delivered too early is worse than one that is not stored.
Source: Pulsar's delayedDeliveryMaxDelayInMillis, which also refuses the message.
"""

from bindery_broker.errors import DelayTooLong


def check_delay(deliver_at_ms: int, *, now_ms: int, delay_s_max: int) -> None:
    """Raise DelayTooLong if `deliver_at_ms` is more than `delay_s_max` seconds after `now_ms`. 0: there is no limit.

    Times are milliseconds since 1970.
    """
    delay_ms = deliver_at_ms - now_ms
    if delay_s_max and delay_ms > delay_s_max * 1_000:
        raise DelayTooLong(
            "the delay is longer than delayed_delivery_max_delay_s allows; use an earlier delivery time, or raise the "
            "setting BROKER_DELAYED_DELIVERY_MAX_DELAY_S of the brokers",
            delay_ms=delay_ms,
            delayed_delivery_max_delay_s=delay_s_max,
        )
