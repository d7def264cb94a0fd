"""`bindery topics`: create, list, inspect, compact and delete topics, and cancel delayed messages."""

import sys
from typing import Annotated, Any, Final

import typer
from bindery_core.errors import Conflict

from bindery.common import exit_codes
from bindery.common.operator import now_ms
from bindery.common.options import AsJson, group
from bindery.common.output import confirm, counted, emit, print_json, print_lines
from bindery.topics.options import Topic, Url
from bindery.topics.subscriptions import list_subscriptions

COMPACTION_POLL_S: Final = 0.5
"""Seconds between two requests for the state of a compaction."""

app = group("Create, list, inspect, compact and delete topics, and cancel delayed messages.")


@app.command("list")
def list_topics(
    namespace: Annotated[
        str | None, typer.Option(metavar="TENANT/NAMESPACE", help="Only topics of this namespace.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the topics of the cluster. --json prints one array of names.

    Example: bindery topics list --namespace public/default
    """
    from bindery.topics.broker_api import Broker

    names: list[str] = []
    with Broker(url) as broker:
        after: str | None = None
        while True:
            answer = broker.get("/v1/topics", namespace=namespace, after=after)
            names += answer["topics"]
            after = answer.get("next")
            if after is None:
                break
    if as_json:
        print_json(names)
        return
    if names:
        print_lines(names)
    else:
        print("no topics; the first message creates one: echo hello | bindery produce hello", file=sys.stderr)


@app.command("create")
def create(
    topic: Topic,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Number of partitions; left out: the topic is not partitioned.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a topic. With --partitions, its messages are spread over as many topics, which brokers share.

    Example: bindery topics create public/default/orders --partitions 4

    Exit codes: 0 created, or it exists, 1 the topic exists with another number of partitions or none, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, BrokerRefused, topic_path

    path = topic_path(topic)
    with Broker(url) as broker:
        if partitions is None:
            answer = broker.request("PUT", path)
        else:
            try:
                found = broker.get(f"{path}/partitions")["partitions"]
            except BrokerRefused as error:
                if error.http_status != 404:
                    raise
                found = partitions
            if found != partitions:
                raise Conflict(
                    "the topic has another number of partitions; `topics partitions --set` adds some", partitions=found
                )
            answer = broker.request("PUT", f"{path}/partitions", json={"partitions": partitions})
    emit(answer, f"{answer['topic']} {'is created' if answer['created'] else 'exists'}", as_json=as_json)


@app.command("partitions")
def partitions(
    topic: Topic,
    count: Annotated[
        int | None, typer.Option("--set", min=1, metavar="N", help="Add partitions until there are N.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the number of partitions of a topic, or add some. Most keys belong to another partition from then on.

    Example: bindery topics partitions public/default/orders --set 8

    Exit codes: 0 done, 1 no such topic, it is not partitioned, or it has more partitions, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    path = f"{topic_path(topic)}/partitions"
    with Broker(url) as broker:
        answer = broker.get(path)  # also before --set, which would create a missing topic
        if count is not None:
            answer = broker.request("PUT", path, json={"partitions": count})
    emit(answer, str(answer["partitions"]), as_json=as_json)


@app.command("stats")
def stats(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """Show the size and rates of a topic, and the backlog, age and rates of each subscription.

    Rates are those of the last 10 seconds. Numbers with ~ are estimates.

    Example: bindery topics stats public/default/greetings
    """
    from bindery.topics.broker_api import Broker, topic_path
    from bindery.topics.stats_text import topic_lines

    with Broker(url) as broker:
        answer = broker.get(topic_path(topic))
    if as_json:
        print_json(answer)
        return
    print_lines(topic_lines(answer, now_ms=now_ms()))


@app.command("retention")
def retention(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """Show the ledgers of a topic, the oldest first, and for each what keeps it.

    Ledgers are deleted from the oldest on, once every subscription has acknowledged them and the retention is over.

    Example: bindery topics retention public/default/greetings
    """
    from bindery.topics.broker_api import Broker, topic_path
    from bindery.topics.stats_text import retention_lines

    with Broker(url) as broker:
        answer = broker.get(f"{topic_path(topic)}/retention")
    if as_json:
        print_json(answer)
        return
    print_lines(retention_lines(answer, now_ms=now_ms()))


@app.command("subscriptions")
def subscriptions(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """Show the subscriptions of a topic and their consumers, as `bindery subscriptions list` does.

    Example: bindery topics subscriptions public/default/greetings
    """
    list_subscriptions(topic, url=url, as_json=as_json)


@app.command("cancel")
def cancel(
    topic: Topic,
    message_id: Annotated[
        str,
        typer.Argument(metavar="MESSAGE_ID", show_default=False, help="Id of a message that was sent with a delay."),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a delayed message in every subscription that has not delivered it.

    Prints the result for each subscription: cancelled, or already_delivered. The message stays stored until no
    subscription needs its ledger.

    Example: bindery topics cancel reminders 5:0:-1:-1

    Exit codes: 0 cancelled in every subscription, 1 delivered before in one of them, no such message or it has no
    delay, 2 wrong usage.
    """
    from urllib.parse import quote

    from bindery.topics.broker_api import Broker, topic_path

    path = f"{topic_path(topic)}/messages/{quote(message_id, safe='')}"
    with Broker(url) as broker:
        answer = broker.request("DELETE", path)
    results = answer["cancelled"]
    emit(
        answer,
        [f"{name}: {result}" for name, result in results.items()]
        or "no subscriptions: a later one delivers the message",
        as_json=as_json,
    )
    if any(result != "cancelled" for result in results.values()):
        raise typer.Exit(exit_codes.FAILURE)


@app.command("compact")
def compact(
    topic: Topic,
    status: Annotated[bool, typer.Option("--status", help="Start nothing, and show the last compaction.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Keep only the last message of each key for readers of the compacted topic; wait, and show the result.

    If the command is interrupted, the compaction continues.

    Example: bindery topics compact prices

    Exit codes: 0 success, 1 no such topic, or the compaction failed, 2 wrong usage.
    """
    import time

    from bindery.topics.broker_api import Broker, topic_path

    path = f"{topic_path(topic)}/compaction"
    with Broker(url) as broker:
        found = broker.get(path) if status else broker.request("PUT", path)
        while not status and found["status"] == "RUNNING":
            time.sleep(COMPACTION_POLL_S)
            found = broker.get(path)
    line = found["status"]
    if found["last_error"]:
        line += f": {found['last_error']}"
    elif found["status"] != "NOT_RUN":
        line += f": {counted(found['keys'], 'key')}, {found['entries_read']} entries read"
    horizon = "never compacted" if found["horizon"] is None else f"compacted up to {found['horizon']}"
    emit(found, [line, f"{horizon}, {found['bytes_not_compacted']} bytes since then"], as_json=as_json)
    if found["status"] == "ERROR":
        raise typer.Exit(exit_codes.FAILURE)


@app.command("unload")
def unload(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """Close a topic at its broker. The next request opens it again, there: `namespaces unload` moves topics.

    Example: bindery topics unload public/default/greetings

    Exit codes: 0 unloaded, 1 no such topic, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    with Broker(url) as broker:
        answer = broker.request("POST", f"{topic_path(topic)}/unload", json={})
    emit(answer, f"{answer['unloaded']} is unloaded", as_json=as_json)


@app.command("delete")
def delete(
    topic: Topic,
    force: Annotated[bool, typer.Option("--force", help="Delete the topic even if consumers are connected.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a topic with its subscriptions and messages, after a confirmation. Without a terminal, --yes is required.

    Example: bindery topics delete public/default/greetings --yes

    Exit codes: 0 deleted, 1 no such topic, it has consumers (see --force) or not confirmed, 2 --yes is missing.
    """
    from bindery.topics.broker_api import Broker, topic_path

    path = topic_path(topic)
    with Broker(url) as broker:
        if not yes:
            _confirm(broker.get(path), as_json=as_json)
        answer = broker.request("DELETE", path, params={"force": "true"} if force else {})
    emit(answer, f"{answer['deleted']} is deleted", as_json=as_json)


def _confirm(stats: dict[str, Any], *, as_json: bool) -> None:
    """Ask whether to delete the topic; end the command if the answer is not yes."""
    held = f"{counted(stats['entries'], 'entry', 'entries')} and {counted(len(stats['subscriptions']), 'subscription')}"
    confirm(
        f"Delete {stats['topic']} with {held}?",
        unattended=f"{stats['topic']} has {held}, which would be deleted: pass --yes to confirm",
        as_json=as_json,
    )
