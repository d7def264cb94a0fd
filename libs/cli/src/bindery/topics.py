"""`bindery topics`: which topics there are, and how they do."""

import json
import sys
from typing import Annotated

import typer

from bindery.messages import Topic, Url

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Topics: list, stats.")

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
    from bindery.broker_api import Broker

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
    from bindery.broker_api import Broker, topic_path

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
