"""`bindery consume`: receive messages over the HTTP API of a broker.

With --follow, the command reconnects with exponential back-off when the connection breaks, and continues at the same
position. With --ack, messages whose acknowledgement was not confirmed are received again.
"""

import base64
import json
import os
import random
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest

from bindery.common.options import AsJson
from bindery.topics.options import Topic, Url

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

T = TypeVar("T")

BATCH_MESSAGES: Final = 100
"""Maximum number of messages in one request."""
WAIT_MS: Final = 20_000
"""Milliseconds that a request of --follow waits for messages."""
DRAIN_WAIT_MS: Final = 1_000
"""Milliseconds without a message after which a subscription counts as drained, without --follow."""
DEFAULT_SUBSCRIPTION: Final = "cli"
RETRY_S: Final = 0.2
"""Delay in seconds before the first attempt to reconnect."""
RETRY_S_MAX: Final = 10.0
"""Maximum delay in seconds before an attempt to reconnect."""
_TEMPORARY: Final = frozenset({429, 502, 503, 504})
"""HTTP statuses of a broker that is busy or restarts, or whose topic is moving to another broker."""


def consume(
    topic: Topic,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", "-s", metavar="NAME", help="Subscription for --ack; default: cli."),
    ] = None,
    ack: Annotated[
        bool,
        typer.Option("--ack", help="Receive through a subscription and acknowledge; default: read from --start."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new messages, and reconnect; Ctrl-C ends it.")
    ] = False,
    maximum: Annotated[
        int | None, typer.Option("--max", metavar="N", min=1, help="Number of messages after which the command ends.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="POSITION", help="Position to read from: earliest, latest or a message id; default: earliest."
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print messages of a topic: the payloads, or with --json all fields.

    A payload that the broker did not decode (encrypted, a chunk of a message, or too large) is printed as stored, with
    a warning; --json shows its encoding.

    Without --ack nothing changes on the broker. With --ack a message is acknowledged after it was printed: if the
    command fails in between, the message is delivered again. The topic is not created if it does not exist.

    Examples:

      bindery consume greetings --follow

      bindery consume orders --ack --subscription billing --max 100 --json

    Exit codes: 0 success, 1 the topic does not exist or the broker failed.
    """
    from bindery.topics.broker_api import Broker, topic_path

    if subscription is not None and not ack:
        raise BadRequest("--subscription needs --ack: without it, messages are read without a subscription")
    if start is not None and ack:
        raise BadRequest("--start cannot be used with --ack: a subscription has its own position")
    path = topic_path(topic)
    retries = Retries(is_enabled=follow)
    with Broker(url) as broker:
        if ack:
            broker.get(path)  # receiving would create a topic that does not exist
        source = (
            _receive(
                broker, path, subscription or DEFAULT_SUBSCRIPTION, follow=follow, maximum=maximum, retries=retries
            )
            if ack
            else _read(broker, path, start or "earliest", follow=follow, maximum=maximum, retries=retries)
        )
        noted: set[str] = set()
        try:
            for message in source:
                _print_message(message, noted, as_json=as_json)
        finally:
            source.close()


class Retries:
    """Repeat requests that fail for a temporary reason. The first request of a command is never repeated."""

    def __init__(self, *, is_enabled: bool, sleep: Callable[[float], None] = time.sleep) -> None:
        self._is_enabled = is_enabled
        self._sleep = sleep
        self._backoff = Backoff(RETRY_S, RETRY_S_MAX, jitter=0.25, randomness=random.SystemRandom())
        self._was_connected = False

    def run(self, request: Callable[[], T]) -> T:
        """Return the result of `request`. Raises its error if it is not temporary, or if retries are disabled."""
        from bindery.topics.broker_api import BrokerRefused, BrokerUnreachable

        while True:
            try:
                result = request()
            except (BrokerUnreachable, BrokerRefused) as error:
                is_temporary = isinstance(error, BrokerUnreachable) or error.http_status in _TEMPORARY
                if not (self._is_enabled and self._was_connected and is_temporary):
                    raise
                delay_s = self._backoff.next_delay_s()
                if self._backoff.failures == 1:
                    print(f"connection lost, reconnecting: {error}", file=sys.stderr, flush=True)
            else:
                if self._backoff.failures:
                    print("reconnected", file=sys.stderr, flush=True)
                self._backoff.reset()
                self._was_connected = True
                return result
            self._sleep(delay_s)


def _read(
    broker: "Broker", path: str, start: str, *, follow: bool, maximum: int | None, retries: Retries
) -> Generator[dict[str, Any], None, None]:
    """Yield messages from `start` on, read without a subscription."""
    left = maximum
    while left is None or left > 0:
        query = {
            "start": start,
            "max": min(BATCH_MESSAGES, left or BATCH_MESSAGES),
            "wait_ms": WAIT_MS if follow else 0,
        }
        answer = retries.run(lambda query=query: broker.get(path + "/messages", **query))  # type: ignore[misc]
        messages, start = answer["messages"], answer["next"]
        yield from messages
        if left is not None:
            left -= len(messages)
        if not messages and not follow:
            return


def _receive(
    broker: "Broker", path: str, subscription: str, *, follow: bool, maximum: int | None, retries: Retries
) -> Generator[dict[str, Any], None, None]:
    """Yield messages of the subscription, and acknowledge them.

    A message counts as printed when the caller asks for the next one. Printed messages are acknowledged after each
    request, and when the caller stops. The other received messages are then returned to the subscription.
    """
    from bindery.topics.broker_api import subscription_path

    base = path + subscription_path(subscription)
    consumer = f"cli-{os.getpid()}"
    left = maximum
    printed: list[str] = []
    pending: list[str] = []
    try:
        while left is None or left > 0:
            body = {
                "consumer": consumer,
                "max": min(BATCH_MESSAGES, left or BATCH_MESSAGES),
                "wait_ms": WAIT_MS if follow else DRAIN_WAIT_MS,
            }
            messages = retries.run(lambda body=body: broker.post(base + "/receive", body))["messages"]  # type: ignore[misc]
            if not messages and not follow:
                return
            pending = [message["message_id"] for message in messages]
            for message in messages:
                yield message
                printed.append(pending.pop(0))
            if left is not None:
                left -= len(messages)
            if printed:
                done = {"message_ids": printed, "consumer": consumer}
                retries.run(lambda done=done: broker.post(base + "/ack", done))  # type: ignore[misc]
                printed = []
    finally:
        if printed:
            broker.post(base + "/ack", {"message_ids": printed, "consumer": consumer})
        if pending:
            broker.post(base + "/nack", {"message_ids": pending, "consumer": consumer})


def _print_message(message: dict[str, Any], noted: set[str], *, as_json: bool) -> None:
    """`noted`: the reasons of encodings of which stderr has a line already."""
    if as_json:
        print(json.dumps(message, ensure_ascii=False), flush=True)
        return
    if "encoding" in message and (reason := message["encoding"]["reason"]) not in noted:
        noted.add(reason)
        print(
            f"warning: message {message['message_id']} is not decoded ({reason}). Payloads of this kind are printed as "
            "stored; --json shows their encoding.",
            file=sys.stderr,
            flush=True,
        )
    payload = message.get("payload")
    raw = base64.b64decode(message["payload_base64"]) if payload is None else payload.encode()
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
