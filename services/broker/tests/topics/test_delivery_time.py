"""A delay above the limit is refused with the name of the setting, and never shortened."""

import pytest
from bindery_broker.errors import DelayTooLong
from bindery_broker.topics.delivery_time import check_delay

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("delay_ms", [-NOW_MS, 0, 9_999, 10_000])
def test_a_delay_up_to_the_limit_is_allowed(delay_ms: int) -> None:
    check_delay(NOW_MS + delay_ms, now_ms=NOW_MS, delay_s_max=10)


def test_a_longer_delay_is_refused_with_the_setting_and_both_values() -> None:
    with pytest.raises(DelayTooLong, match="BROKER_DELAYED_DELIVERY_MAX_DELAY_S") as caught:
        check_delay(NOW_MS + 10_001, now_ms=NOW_MS, delay_s_max=10)
    assert caught.value.facts == {"delay_ms": 10_001, "delayed_delivery_max_delay_s": 10}


def test_without_a_limit_any_delay_is_allowed() -> None:
    check_delay(2**63 - 1, now_ms=0, delay_s_max=0)
