"""`bindery topics policies` and `bindery topics set-policy`."""

import json
from typing import Annotated

import typer

from bindery.common.options import AsJson
from bindery.common.output import emit
from bindery.namespaces.names import Settings, parse_policies, policy_lines
from bindery.topics.options import Topic, Url


def policies(
    topic: Topic,
    effective: Annotated[
        bool, typer.Option("--effective", help="Show all policies in force, and the level that sets each.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the policies that a topic sets; those of its namespace apply for all others.

    Example: bindery topics policies public/default/greetings --effective
    """
    from bindery.topics.broker_api import Broker, topic_path

    path = f"{topic_path(topic)}/policies"
    with Broker(url) as broker:
        if not effective:
            found = broker.get(path)["policies"]
            emit(found, policy_lines(found) or ["no policies are set"], as_json=as_json)
            return
        in_force = broker.get(path, effective="true")["effective"]
    width = max(len(name) for name in in_force)
    lines = [f"{name:{width}}  {one['source']:9}  {json.dumps(one['value'])}" for name, one in in_force.items()]
    emit(in_force, lines, as_json=as_json)


def set_policy(topic: Topic, settings: Settings, url: Url = None, as_json: AsJson = False) -> None:
    """Set policies of a topic and of its partitions. The value null removes one.

    Example: bindery topics set-policy public/default/greetings message_ttl_s=60
    """
    from bindery.topics.broker_api import Broker, topic_path

    body = parse_policies(settings)
    with Broker(url) as broker:
        found = broker.request("PUT", f"{topic_path(topic)}/policies", json=body)["policies"]
    emit(found, policy_lines(found) or ["no policies are set"], as_json=as_json)
