"""`bindery schemas`: show, upload, compare and delete the schema of a topic."""

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest

from bindery.common import exit_codes
from bindery.common.options import AsJson, group
from bindery.common.output import confirm, print_json, print_lines
from bindery.topics.options import Topic, Url, parse_properties

DEFINITION_SIZE_MAX: Final = 2**20
"""Maximum bytes of a file that is read. The broker has a lower limit."""

app = group("Show, upload, compare and delete the schema of a topic.")

Kind = Annotated[
    str, typer.Option("--type", metavar="TYPE", help="AVRO, JSON, STRING, ...: the types of Pulsar's admin API.")
]
Definition = Annotated[
    str | None,
    typer.Option(
        "--file", metavar="FILE", help="Definition: an Avro schema for AVRO, JSON and PROTOBUF. `-`: standard input."
    ),
]
Properties = Annotated[
    list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Property of the schema; repeatable.")
]


@app.command("get")
def get(
    topic: Topic,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=0, help="Version to show; default: the newest.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--versions", help="List the versions instead.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the definition of a topic's schema, or its versions. --json adds type, version, properties and time.

    Example: bindery schemas get orders > orders.avsc

    Exit codes: 0 success, 1 no such schema, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    if list_all and version is not None:
        raise BadRequest("--versions and --version cannot be combined")
    path = topic_path(topic) + "/schema"
    with Broker(url) as broker:
        if list_all:
            found = broker.get(f"{path}/versions")
            if as_json:
                print_json(found)
            else:
                print_lines([str(one) for one in found["versions"]])
            return
        found = broker.get(path if version is None else f"{path}/versions/{version}")
    if as_json:
        print_json(found)
    else:
        print_lines((found["definition"] or found["type"]).splitlines())


@app.command("upload")
def upload(
    topic: Topic,
    kind: Kind,
    file: Definition = None,
    properties: Properties = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Add a schema version, if it is compatible with the versions of the topic. Prints its number.

    The topic need not exist. A schema that the topic has is not added again.

    Example: bindery schemas upload orders --type AVRO --file orders.avsc

    Exit codes: 0 success, 1 refused, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    body = _body(kind, file, properties)
    with Broker(url) as broker:
        done = broker.post(topic_path(topic) + "/schema", body)
    if as_json:
        print_json(done)
    else:
        print_lines([f"version {done['version']}{'' if done['created'] else ' (existed)'}"])


@app.command("compatibility")
def compatibility(
    topic: Topic,
    kind: Kind,
    file: Definition = None,
    properties: Properties = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a schema could be uploaded, and change nothing.

    Example: bindery schemas compatibility orders --type AVRO --file new.avsc

    Exit codes: 0 compatible, 1 not compatible or failed, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    body = _body(kind, file, properties)
    with Broker(url) as broker:
        found = broker.post(topic_path(topic) + "/schema/compatibility", body)
    if as_json:
        print_json(found)
    elif found["version"] is not None:
        print_lines([f"compatible: it is version {found['version']}"])
    elif found["compatible"]:
        print_lines([f"compatible ({found['strategy']})"])
    else:
        print_lines([f"not compatible ({found['strategy']}): {found['reason']}"])
    if not found["compatible"]:
        raise typer.Exit(exit_codes.FAILURE)


@app.command("delete")
def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the stored definitions, too, and those of earlier deletions.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete all schema versions of a topic; also those that cannot be read. Later versions get higher numbers.

    Consumers then cannot look up the schemas of messages that are stored.

    Exit codes: 0 success, 1 no such schema, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    path = topic_path(topic) + "/schema"
    if not yes:
        confirm(
            f"Delete all schema versions of {topic}?",
            unattended="this deletes all schema versions of the topic: pass --yes to confirm",
            as_json=as_json,
        )
    with Broker(url) as broker:
        done = broker.request("DELETE", path, params={"force": "true"} if force else {})
    if as_json:
        print_json(done)
    else:
        print_lines(["deleted"])


def _body(kind: str, file: str | None, properties: list[str] | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": kind.upper().replace("-", "_"),
        "properties": parse_properties(properties or []),
    }
    if file is not None:
        body["definition"] = _read(file)
    return body


def _read(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(DEFINITION_SIZE_MAX + 1)
        else:
            with Path(file).open("rb") as source:
                data = source.read(DEFINITION_SIZE_MAX + 1)
        if len(data) > DEFINITION_SIZE_MAX:
            raise BadRequest("the definition is too large", size_max=DEFINITION_SIZE_MAX)
        return data.decode()
    except OSError as error:
        raise BadRequest(f"cannot read the definition: {error.strerror}", file=file) from error
    except UnicodeDecodeError as error:
        raise BadRequest("the definition is not UTF-8", file=file) from error
