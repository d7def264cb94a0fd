"""Limit a rate of messages and bytes by a policy, with token buckets. Pure; times are monotonic seconds.

Whoever finds the buckets above zero may take any number of tokens, so that a message larger than the rate passes too.
Over any span the rate is exceeded by at most one period and one request.
"""

from bindery_kit.limits.token_bucket import TokenBucket

from bindery_broker.namespaces.policies import Rate


class RateLimit:
    """Limits messages and bytes as the present policy says. A change of the policy does not forgive a debt."""

    def __init__(self) -> None:
        self._rate: Rate | None = None
        self._messages: TokenBucket | None = None
        self._size: TokenBucket | None = None

    def set(self, rate: Rate | None, now: float) -> None:
        """Set the policy that is in force; None: no limit. Cheap if it has not changed."""
        if rate == self._rate:
            return
        self._rate = rate
        period_s = 1 if rate is None else rate.period_s
        self._messages = _changed(self._messages, None if rate is None else rate.messages, period_s, now)
        self._size = _changed(self._size, None if rate is None else rate.size, period_s, now)

    @property
    def rate(self) -> Rate | None:
        """The policy in force; None: no limit."""
        return self._rate

    def wait_s(self, now: float) -> float:
        """Return the seconds until something may pass; 0: now."""
        return max(
            self._messages.wait_s(now) if self._messages is not None else 0.0,
            self._size.wait_s(now) if self._size is not None else 0.0,
        )

    def messages_max(self, now: float) -> int | None:
        """Return how many messages may pass now without a debt, at least 1; None: any number."""
        return None if self._messages is None else max(1, int(self._messages.tokens(now)))

    def take(self, messages: int, size: int, now: float) -> None:
        """Count what passes."""
        if self._messages is not None:
            self._messages.take(messages, now)
        if self._size is not None:
            self._size.take(size, now)

    def text(self) -> str:
        """Return the limit for people."""
        rate = self._rate
        if rate is None:
            return "no limit"
        parts = [f"{rate.messages} messages"] if rate.messages is not None else []
        parts += [f"{rate.size} bytes"] if rate.size is not None else []
        return f"{' and '.join(parts)} in {rate.period_s} s"


def _changed(bucket: TokenBucket | None, count: int | None, period_s: int, now: float) -> TokenBucket | None:
    """Return the bucket for `count` tokens in a period; None: there is no limit."""
    if count is None:
        return None
    period_s = max(period_s, 1)
    rate = max(count, 1) / period_s
    if bucket is None:
        return TokenBucket(rate=rate, period_s=period_s, now=now)
    bucket.change(rate=rate, period_s=period_s, now=now)
    return bucket
