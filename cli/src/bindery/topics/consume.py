"""`bindery consume`: receive messages over the HTTP API of a broker.

With --follow, the command reconnects with exponential back-off when the connection breaks, and continues at the same
position. With --ack, messages whose acknowledgement was not confirmed are received again.

With --ack, each request acknowledges the messages that were printed since the request before it, and the consumer
leaves the subscription at the end, so that its messages and keys go to other consumers at once.
"""

import base64
import itertools
import json
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, BinderyError
from bindery_kit.observability.printable import printable

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
LEAVE_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds to leave the subscription. Without an answer, the broker ends the session by its own time."""
KEY_HASH_MAX: Final = 65_535
"""The last hash of a key. The first is 0."""
_KEY_RANGE: Final = re.compile(r"(\d{1,5})-(\d{1,5})")
_MESSAGE_ID: Final = re.compile(r"\d+:\d+(:(-1|\d+)){0,2}")
_TEMPORARY: Final = frozenset({429, 502, 503, 504})
"""HTTP statuses of a broker that is busy or restarts, or whose topic is moving to another broker."""


class SubscriptionType(StrEnum):
    """How the consumers of a subscription share its messages."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    FAILOVER = "failover"
    KEY_SHARED = "key_shared"


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
            metavar="POSITION",
            help="Where to begin: earliest, latest, a message id, or a publish time: 5m (ago), 2026-12-01T08:00:00Z or "
            "@MS (since 1970); default: earliest.",
        ),
    ] = None,
    kind: Annotated[
        SubscriptionType | None,
        typer.Option("--type", help="How consumers share the messages of the subscription; default: shared."),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=1_000,
            help="Consumers with the lowest number are preferred (shared and failover); default: 0.",
        ),
    ] = None,
    key_ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--key-range",
            metavar="FIRST-LAST",
            help="Range of key hashes (0 to 65535) for this consumer, instead of a share (key_shared); repeatable.",
        ),
    ] = None,
    allow_out_of_order: Annotated[
        bool,
        typer.Option(
            "--allow-out-of-order",
            help="Deliver messages of a key even while another consumer holds earlier ones (key_shared).",
        ),
    ] = False,
    no_durable: Annotated[
        bool,
        typer.Option("--no-durable", help="Do not store the subscription: it ends with its last consumer."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print messages of a topic: the payloads, or with --json all fields.

    On a terminal, control characters of payloads are escaped. A file or pipe gets the bytes of the payload.

    A payload that the broker did not decode (encrypted, a chunk of a message, or too large) is printed as stored, with
    a warning; --json shows its encoding.

    Without --ack nothing changes on the broker. With --ack a message is acknowledged after it was printed: if the
    command fails in between, the message is delivered again. The topic is not created if it does not exist.

    Each consumer of a shared subscription gets other messages. key_shared is the same, with the messages of a key in
    order to one consumer. In a failover subscription one consumer gets all messages in order, and another one takes
    over when it leaves. An exclusive subscription has one consumer.

    Examples:

      bindery consume greetings --follow

      bindery consume orders --start 5m

      bindery consume orders --ack --subscription billing --max 100 --json

      bindery consume orders --ack --subscription shipping --type key_shared --follow

    Exit codes: 0 success, 1 the topic does not exist or the broker failed, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    given = {
        "--subscription": subscription is not None,
        "--type": kind is not None,
        "--priority": priority is not None,
        "--key-range": bool(key_ranges),
        "--allow-out-of-order": allow_out_of_order,
        "--no-durable": no_durable,
    }
    for option, is_given in given.items():
        if is_given and not ack:
            raise BadRequest(f"{option} needs --ack: without it, messages are read without a subscription")
    if start is not None and ack:
        raise BadRequest("--start cannot be used with --ack: a subscription has its own position")
    first = _start(start or "earliest")
    fields = _consumer_fields(
        kind or SubscriptionType.SHARED, priority, key_ranges or [], allow_out_of_order=allow_out_of_order
    )
    if no_durable:
        fields["durable"] = False
    path = topic_path(topic)
    retries = Retries(is_enabled=follow)
    with Broker(url) as broker:
        if ack:
            broker.get(path)  # receiving would create a topic that does not exist
        source = (
            _receive(
                broker,
                path,
                subscription or DEFAULT_SUBSCRIPTION,
                fields,
                follow=follow,
                maximum=maximum,
                retries=retries,
            )
            if ack
            else _read(broker, path, first, follow=follow, maximum=maximum, retries=retries)
        )
        noted: set[str] = set()
        try:
            for message in source:
                _print_message(message, noted, as_json=as_json)
        finally:
            source.close()


def _start(text: str) -> str:
    """Return the query parameter `start` of a place, or of a time (`parse_moment`). Raises BadRequest."""
    from bindery.common.operator import now_ms, parse_moment

    if text in ("earliest", "latest") or _MESSAGE_ID.fullmatch(text):
        return text
    try:
        return f"@{parse_moment(text, now_ms=now_ms())}"
    except BadRequest:
        raise BadRequest(
            "--start is earliest, latest, a message id, or a time like 5m (ago), 2026-12-01T08:00:00Z or @MS",
            given=text,
        ) from None


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
    broker: "Broker",
    path: str,
    subscription: str,
    fields: Mapping[str, Any],
    *,
    follow: bool,
    maximum: int | None,
    retries: Retries,
) -> Generator[dict[str, Any], None, None]:
    """Yield messages of the subscription, and acknowledge them. `fields`: those of each request that say how to share.

    A message counts as printed when the caller asks for the next one. The next request acknowledges the printed
    messages, or the last one when the caller stops. The consumer then leaves, which returns the other messages.
    """
    from bindery.topics.broker_api import consumer_path, subscription_path

    base = path + subscription_path(subscription)
    consumer = f"cli-{socket.gethostname()}-{os.getpid()}"
    left = maximum
    printed: list[str] = []
    noted = ""
    numbers = itertools.count()
    try:
        while left is None or left > 0:
            body = {
                **fields,
                "consumer": consumer,
                "request_id": str(next(numbers)),  # a repeated request gets the messages of the answer that was lost
                "max": min(BATCH_MESSAGES, left or BATCH_MESSAGES),
                "wait_ms": WAIT_MS if follow else DRAIN_WAIT_MS,
            }
            if printed:
                body["ack"] = printed
            answer = retries.run(lambda body=body: broker.post(base + "/receive", body))  # type: ignore[misc]
            messages = answer["messages"]
            printed = []
            if (reason := answer.get("blocked")) is not None and reason["code"] != noted:
                noted = reason["code"]
                typer.echo(f"bindery: no messages: {printable(reason['detail'])}", err=True)
            if not messages and not follow:
                return
            for message in messages:
                yield message
                printed.append(message["message_id"])
            if left is not None:
                left -= len(messages)
        if printed:
            done, printed = {"message_ids": printed, "consumer": consumer}, []
            retries.run(lambda: broker.post(base + "/ack", done))
    finally:
        try:
            if printed:
                broker.post(base + "/ack", {"message_ids": printed, "consumer": consumer})
        finally:
            with suppress(BinderyError):  # the broker then ends the session when its time is over
                broker.request("DELETE", base + consumer_path(consumer), timeout=LEAVE_TIMEOUT_S)


def _consumer_fields(
    kind: SubscriptionType, priority: int | None, key_ranges: Sequence[str], *, allow_out_of_order: bool
) -> dict[str, Any]:
    """Return the fields of a request that say how the consumer shares the subscription. Raises BadRequest."""
    fields: dict[str, Any] = {"type": kind.value}
    if priority is not None:
        if kind not in (SubscriptionType.SHARED, SubscriptionType.FAILOVER):
            raise BadRequest(f"--priority has no effect with --type {kind}; it needs shared or failover")
        fields["priority"] = priority
    key_shared: dict[str, Any] = {}
    if key_ranges:
        key_shared |= {"mode": "sticky", "ranges": [_key_range(text) for text in key_ranges]}
    if allow_out_of_order:
        key_shared["allow_out_of_order"] = True
    if key_shared:
        if kind is not SubscriptionType.KEY_SHARED:
            option = "--key-range" if key_ranges else "--allow-out-of-order"
            raise BadRequest(f"{option} needs --type key_shared")
        fields["key_shared"] = key_shared
    return fields


def _key_range(text: str) -> tuple[int, int]:
    found = _KEY_RANGE.fullmatch(text)
    first, last = (int(found[1]), int(found[2])) if found else (1, 0)
    if not first <= last <= KEY_HASH_MAX:
        raise BadRequest(f"not a range of key hashes; the format is FIRST-LAST, from 0 to {KEY_HASH_MAX}", given=text)
    return first, last


def _print_message(message: dict[str, Any], noted: set[str], *, as_json: bool) -> None:
    """`noted`: the reasons of encodings of which stderr has a line already."""
    if as_json:
        print(printable(json.dumps(message, ensure_ascii=False)), flush=True)
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
    if sys.stdout.isatty():
        text = raw.decode(errors="backslashreplace")
        print("\n".join([printable(line.expandtabs()) for line in text.split("\n")]), flush=True)
        return
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
