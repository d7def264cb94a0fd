"""`bindery topics`: which topics there are, how they do, and how they go."""

import json
import sys
from typing import Annotated, Any, Final

import typer

from bindery.topics.messages import Topic, Url

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Topics: list, stats, delete.")
EXIT_NOT_DONE: Final = 1
EXIT_USAGE: Final = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_topics(
    namespace: Annotated[
        str | None, typer.Option(metavar="TENANT/NAMESPACE", help="Only topics of this namespace.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the topics of the cluster."""
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
        print(json.dumps(names))
        return
    for name in names:
        print(name)
    if not names:
        print("no topics yet; the first message makes one: echo hello | bindery produce hello", file=sys.stderr)


@app.command("stats")
def stats(topic: Topic, url: Url = None, as_json: AsJson = False) -> None:
    """Show one topic: what it holds, what flows, and each subscription's backlog."""
    from bindery.topics.broker_api import Broker, topic_path

    with Broker(url) as broker:
        answer = broker.get(topic_path(topic))
    if as_json:
        print(json.dumps(answer, indent=2))
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
    force: Annotated[bool, typer.Option("--force", help="Even while consumers are connected: they lose it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a topic with its subscriptions and messages. It asks first; where nobody can be asked it needs --yes.

    Exit codes: 1 no such topic, it has consumers (--force), or answered no; 2 without --yes and nobody to ask.
    """
    from bindery.topics.broker_api import Broker, topic_path

    path = topic_path(topic)
    with Broker(url) as broker:
        if not yes:
            _ask(broker.get(path))
        answer = broker.request("DELETE", path, params={"force": "true"} if force else {})
    print(json.dumps(answer) if as_json else f"{answer['deleted']} is deleted")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(stats: dict[str, Any]) -> None:
    """Ends the command unless somebody says yes."""
    held = f"{stats['entries']} entries and {len(stats['subscriptions'])} subscriptions"
    if not _is_terminal():
        print(f"bindery: {stats['topic']} has {held}, which would be gone: say --yes too", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    if not typer.confirm(f"Delete {stats['topic']} with {held}?", err=True):
        raise typer.Exit(EXIT_NOT_DONE)
