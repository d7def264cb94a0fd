"""`bindery subscriptions`: list, create, move and delete subscriptions, and explain why messages are not delivered.

Commands that discard messages or acknowledgements ask first. Each of them waits until the change is durable.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from bindery_core.errors import BadRequest
from bindery_kit.observability.printable import printable

from bindery.common.operator import now_ms, parse_duration, parse_moment
from bindery.common.options import AsJson, group
from bindery.common.output import confirm, counted, emit, print_json, print_lines
from bindery.topics.options import Properties, Topic, Url, parse_properties

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

app = group("List, create, move and delete subscriptions, and explain why messages are not delivered.")

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Subscription.")]
Confirmed = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


@app.command("list")
def list_subscriptions(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """List the subscriptions of a topic and their consumers. --json prints one array of subscriptions.

    Example: bindery subscriptions list orders

    Exit codes: 0 success, 1 no such topic.
    """
    from bindery.topics.broker_api import Broker, topic_path
    from bindery.topics.stats_text import subscription_lines

    found: list[dict[str, Any]] = []
    damaged: dict[str, str] = {}
    with Broker(url) as broker:
        after: str | None = None
        while True:
            answer = broker.get(topic_path(topic) + "/subscriptions", after=after)
            found += answer["subscriptions"]
            damaged |= answer.get("damaged", {})
            after = answer.get("next")
            if after is None:
                break
    if as_json:
        print_json(found)
    else:
        print_lines(subscription_lines(found, now_ms=now_ms()))
    for name, reason in damaged.items():
        print(printable(f"subscription {name} is damaged: {reason}"), file=sys.stderr)


@app.command("show")
def show(topic: Topic, name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Show one subscription: its position, backlog, rates, settings and consumers.

    Example: bindery subscriptions show orders billing

    Exit codes: 0 success, 1 no such topic or subscription.
    """
    from bindery.common.tables import lines_of
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        about = broker.get(_path(topic, name) + "/explain")["subscription"]
    emit(about, lines_of(_readable(about)), as_json=as_json)


@app.command("create")
def create(
    topic: Topic,
    name: Name,
    initial: Annotated[
        str, typer.Option(metavar="POSITION", show_default=True, help="First message: earliest or latest.")
    ] = "earliest",
    tags: Annotated[
        str | None,
        typer.Option(metavar="TAGS", help="Deliver only messages with one of these tags, separated by ||."),
    ] = None,
    properties: Properties = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a subscription, so that messages are kept for it before its first consumer connects.

    A missing topic is created, too. Nothing changes if the subscription exists. Consumers choose the type when they
    connect; tags are fixed.

    Example: bindery subscriptions create orders billing --tags "eu||uk"

    Exit codes: 0 the subscription exists, 1 it exists with other tags, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker

    if initial not in ("earliest", "latest"):
        raise BadRequest("--initial is earliest or latest; `bindery subscriptions seek` moves elsewhere", given=initial)
    body: dict[str, Any] = {"initial": initial}
    if tags is not None:
        body["tags"] = tags
    if properties:
        body["subscription_properties"] = parse_properties(properties)
    path = _path(topic, name)
    with Broker(url) as broker:
        answer = broker.request("PUT", path, json=body)
    emit(answer, f"{name} {'is created' if answer['created'] else 'existed already'}", as_json=as_json)


@app.command("delete")
def delete(
    topic: Topic,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Delete it even if consumers are connected.")] = False,
    yes: Confirmed = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a subscription after a confirmation. Messages that no other subscription needs are deleted later.

    Example: bindery subscriptions delete orders billing --yes

    Exit codes: 0 deleted, 1 no such subscription, it has consumers (see --force) or not confirmed, 2 --yes is missing.
    """
    from bindery.topics.broker_api import Broker

    path = _path(topic, name)
    with Broker(url) as broker:
        if not yes:
            _confirm(broker, path, f"Delete {name}", as_json=as_json)
        answer = broker.request("DELETE", path, params={"force": "true"} if force else {})
    emit(answer, f"{name} is deleted", as_json=as_json)


@app.command("seek")
def seek(
    topic: Topic,
    name: Name,
    to: Annotated[
        str | None, typer.Option(metavar="POSITION", help="Next message: earliest, latest or a message id.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Continue with the first message published at this time or later: 5m (ago), 2026-12-01T08:00:00Z or "
            "@MS (since 1970).",
        ),
    ] = None,
    percent: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, max=100, help="Continue after N percent of the stored entries; 0 is the first entry."
        ),
    ] = None,
    yes: Confirmed = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move a subscription to a message, a time or a percentage, after a confirmation.

    This discards all acknowledgements of the subscription: messages before the position are not delivered any more, and
    all messages after it are delivered, also those that were acknowledged.

    Examples:

      bindery subscriptions seek orders billing --to earliest --yes

      bindery subscriptions seek orders billing --time 2026-12-01T08:00:00Z

      bindery subscriptions seek orders billing --time 5m

    Exit codes: 0 moved, 1 no such subscription or not confirmed, 2 wrong usage or --yes is missing.
    """
    if sum(value is not None for value in (to, time, percent)) != 1:
        raise BadRequest("exactly one of --to, --time and --percent is required")
    body: dict[str, Any] = {}
    if to is not None:
        body["message_id"] = to
    elif time is not None:
        body["timestamp"] = parse_moment(time, now_ms=now_ms())
    else:
        body["percent"] = percent
    _move(topic, name, "seek", body, f"Discard all acknowledgements of {name} and move it", url, yes, as_json=as_json)


@app.command("skip")
def skip(
    topic: Topic,
    name: Name,
    entries: Annotated[
        int, typer.Option(metavar="N", min=1, show_default=False, help="Number of entries; a batch is one entry.")
    ],
    yes: Confirmed = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Acknowledge the next entries of a subscription without delivering them, after a confirmation.

    Messages that consumers hold stay with them.

    Example: bindery subscriptions skip orders billing --entries 10 --yes

    Exit codes: 0 skipped, 1 no such subscription or not confirmed, 2 wrong usage or --yes is missing.
    """
    _move(topic, name, "skip", {"entries": entries}, f"Skip {entries} entries in {name}", url, yes, as_json=as_json)


@app.command("expire")
def expire(
    topic: Topic,
    name: Name,
    older_than: Annotated[
        str,
        typer.Option(metavar="TIME", show_default=False, help="Minimum age of the messages: 90s, 10m, 1h30m or 2d."),
    ],
    yes: Confirmed = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Acknowledge the messages of a subscription that were published longer ago, after a confirmation.

    Delayed messages are included. Messages that consumers hold stay with them.

    Example: bindery subscriptions expire orders billing --older-than 1h --yes

    Exit codes: 0 expired, 1 no such subscription or not confirmed, 2 wrong usage or --yes is missing.
    """
    body = {"older_than_ms": round(parse_duration(older_than) * 1_000)}
    question = f"Acknowledge the messages older than {older_than} in {name}"
    _move(topic, name, "expire", body, question, url, yes, as_json=as_json)


@app.command("clear")
def clear(topic: Topic, name: Name, yes: Confirmed = False, url: Url = None, as_json: AsJson = False) -> None:
    """Acknowledge everything that is stored now for a subscription, after a confirmation.

    Delayed messages are included. Messages that consumers hold stay with them.

    Example: bindery subscriptions clear orders billing --yes

    Exit codes: 0 cleared, 1 no such subscription or not confirmed, 2 --yes is missing.
    """
    _move(topic, name, "clear", {}, f"Acknowledge all messages in {name}", url, yes, as_json=as_json)


@app.command("explain")
def explain(
    topic: Topic,
    name: Name,
    message_id: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE_ID]", show_default=False, help="Explain this message only.")
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Explain why MESSAGE_ID is not delivered to this consumer."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Explain why messages of a subscription are not delivered, or why one message is not.

    Examples:

      bindery subscriptions explain orders billing

      bindery subscriptions explain orders billing 5:0:-1:0 --consumer c1

    Exit codes: 0 success, 1 no such subscription or message, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker

    if consumer is not None and message_id is None:
        raise BadRequest("--consumer needs a MESSAGE_ID; `bindery subscriptions show` lists the consumers")
    path = _path(topic, name)
    with Broker(url) as broker:
        answer = broker.get(path + "/explain", message_id=message_id, consumer=consumer)
    if message_id is None:
        answer.pop("message", None)
        states = ", ".join(f"{state} {count}" for state, count in answer["states"].items() if count)
        lines = [answer["summary"]]
        if states:
            lines.append(f"messages read and not acknowledged: {states}")
        lines += [f"warning: {warning}" for warning in answer.get("warnings", [])]
        emit(answer, lines, as_json=as_json)
        return
    reason = answer["message"]
    emit(reason, f"{reason['message_id']} {reason['code']}: {reason['detail']}", as_json=as_json)


def _path(topic: str, name: str) -> str:
    from bindery.topics.broker_api import subscription_path, topic_path

    return topic_path(topic) + subscription_path(name)


def _move(
    topic: str,
    name: str,
    verb: str,
    body: Mapping[str, Any],
    question: str,
    url: str | None,
    yes: bool,
    *,
    as_json: bool,
) -> None:
    """Ask, then move the subscription and print where it continues."""
    from bindery.topics.broker_api import Broker

    path = _path(topic, name)
    with Broker(url) as broker:
        if not yes:
            _confirm(broker, path, question, as_json=as_json)
        answer = broker.post(f"{path}/{verb}", body)
    places = answer.get("partitions") or {}
    emit(
        answer,
        [f"{name} continues in partition {index} at {place}" for index, place in places.items()]
        or f"{name} continues at {answer['next']}",
        as_json=as_json,
    )


def _confirm(broker: "Broker", path: str, question: str, *, as_json: bool) -> None:
    """Ask with the present backlog; end the command if the answer is not yes."""
    about = broker.get(path + "/explain")["subscription"]
    entries, consumers = about["backlog_entries"], len(about["consumers"])
    held = (
        f"{counted(entries, 'entry', 'entries')} {'is' if entries == 1 else 'are'} not acknowledged, "
        f"{counted(consumers, 'consumer')} {'is' if consumers == 1 else 'are'} connected"
    )
    confirm(f"{question}? ({held})", unattended=f"{held}: pass --yes to confirm", as_json=as_json)


def _readable(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with words instead of underscores, and times as text."""
    from bindery.common.operator import time_text

    shown: dict[str, Any] = {"subscription": about["subscription"]} if "subscription" in about else {}
    for name, value in about.items():
        label = name.replace("_", " ")
        if name == "consumers":
            shown[label] = [_readable(consumer) for consumer in value] or "none"
        elif name.endswith(("_at", "_since")) and isinstance(value, int):
            shown[label] = time_text(value)
        elif value != {}:
            shown[label] = value
    return shown
