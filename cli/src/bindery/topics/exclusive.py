"""Take a topic exclusively for a producer, and release it: `bindery produce --access`, `bindery topics release`.

A producer has the topic until it releases it or is fenced, also if its client has died (ADR 0021). So `produce`
releases the topic at its end, also after an error and Ctrl-C. If it cannot, it prints the command that does.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer
from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError

from bindery.common.options import AsJson
from bindery.common.output import emit
from bindery.topics.options import Topic, Url

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

WAIT_MS: Final = 20_000
"""Milliseconds of one request that waits for a topic. They are repeated without end."""
BUSY_PAUSE_S: Final = 0.2
"""Pause in seconds before a request that waits is repeated, because a broker that stops answers at once."""
TAKE_S: Final = 60.0
RELEASE_S: Final = 10.0
"""Maximum time in seconds for which a request to take, and to release, is repeated while the broker has no answer."""
_TAKEN: Final = frozenset(("producer_busy", "producer_fenced"))
"""Codes of a topic that another producer has."""


class AccessMode(StrEnum):
    EXCLUSIVE = "exclusive"
    EXCLUSIVE_WITH_FENCING = "exclusive_with_fencing"
    WAIT_FOR_EXCLUSIVE = "wait_for_exclusive"


@contextmanager
def exclusive_access(broker: "Broker", topic: str, producer: str, mode: AccessMode) -> Iterator[int]:
    """Take a topic and release it at the end of the block. Yields the epoch for the requests of the producer.

    Raises BrokerRefused with the code `producer_fenced` if another producer has the topic, unless `mode` fences it or
    waits for it, BrokerUnreachable.
    """
    epoch = _take(broker, topic, producer, mode)
    try:
        yield epoch
    finally:
        try:
            _release(broker, topic, producer, epoch)
        except BinderyError as error:
            if _code(error) != "producer_fenced":  # else another producer has it
                print(
                    f"warning: {producer} still has the topic ({error}); `bindery topics release {topic} {producer}` "
                    "releases it",
                    file=sys.stderr,
                )


def release(
    topic: Topic,
    producer: Annotated[
        str, typer.Argument(metavar="PRODUCER", show_default=False, help="Name of the producer that has the topic.")
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Release a topic that a producer has exclusively and that has died. If it still runs, its requests are refused.

    Example: bindery topics release public/default/greetings till-7

    Exit codes: 0 the topic is released, or the producer did not have it, 1 no such topic, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        answer = _release(broker, topic, producer, None)
    text = "is released" if answer["released"] else f"was not held by {producer}"
    emit(answer, f"{topic} {text}", as_json=as_json)


def _take(broker: "Broker", topic: str, producer: str, mode: AccessMode) -> int:
    waits = mode is AccessMode.WAIT_FOR_EXCLUSIVE
    body: dict[str, Any] = {"access_mode": str(mode), **({"wait_ms": WAIT_MS} if waits else {})}
    is_announced = False
    while True:
        try:
            answer = _repeated(TAKE_S, lambda: broker.request("PUT", _path(topic, producer), json=body))
        except BinderyError as error:
            if not waits or _code(error) not in _TAKEN:
                raise
            if not is_announced:
                print("waiting for the topic, which another producer has; Ctrl-C ends the wait", file=sys.stderr)
                is_announced = True
            time.sleep(BUSY_PAUSE_S)
        else:
            return int(answer["producer_epoch"])


def _release(broker: "Broker", topic: str, producer: str, epoch: int | None) -> Any:
    params = {} if epoch is None else {"producer_epoch": epoch}
    return _repeated(RELEASE_S, lambda: broker.request("DELETE", _path(topic, producer), params=params))


def _repeated(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what `call` returns, and repeat it after a TryAgain, or if no answer comes. Raises the last error."""
    from bindery.topics.broker_api import BrokerRefused, BrokerUnreachable

    deadline = time.monotonic() + seconds
    backoff = Backoff(0.2, 5.0)
    while True:
        try:
            return call()
        except (BrokerRefused, BrokerUnreachable) as error:
            again = error.is_temporary if isinstance(error, BrokerRefused) else not error.is_absent
            if not again or time.monotonic() >= deadline:
                raise
        time.sleep(backoff.next_delay_s())


def _code(error: BinderyError) -> object:
    from bindery.topics.broker_api import BrokerRefused

    return error.problem.get("code") if isinstance(error, BrokerRefused) else None


def _path(topic: str, producer: str) -> str:
    from bindery.topics.broker_api import topic_path

    return f"{topic_path(topic)}/producers/{quote(producer, safe='')}/access"
