"""`bindery topics`: list, inspect and delete topics."""

import sys
from typing import Annotated, Any

import typer

from bindery.common.options import AsJson, group
from bindery.common.output import confirm, emit, print_json
from bindery.topics.options import Topic, Url

app = group("List, inspect and delete topics.")


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
    for name in names:
        print(name)
    if not names:
        print("no topics; the first message creates one: echo hello | bindery produce hello", file=sys.stderr)


@app.command("stats")
def stats(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """Show the size, rates and consumers of a topic, and the backlog of each subscription.

    Example: bindery topics stats public/default/greetings
    """
    from bindery.topics.broker_api import Broker, topic_path

    with Broker(url) as broker:
        answer = broker.get(topic_path(topic))
    if as_json:
        print_json(answer)
        return
    subscriptions = answer.pop("subscriptions", {})
    for name, value in answer.items():
        print(f"{name.replace('_', ' '):<14} {value}")
    for name, facts in subscriptions.items():
        words = ", ".join(f"{fact.replace('_', ' ')} {value}" for fact, value in facts.items())
        print(f"subscription   {name}: {words}")


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
    held = f"{stats['entries']} entries and {len(stats['subscriptions'])} subscriptions"
    confirm(
        f"Delete {stats['topic']} with {held}?",
        unattended=f"{stats['topic']} has {held}, which would be deleted: pass --yes to confirm",
        as_json=as_json,
    )
