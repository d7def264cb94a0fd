"""`bindery produce` and `bindery consume`: messages in and out over the broker's HTTP API."""

import base64
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

BATCH_LINES_MAX: Final = 500
BATCH_BYTES_MAX: Final = 1024 * 1024
"""One request carries at most so much: a request that fails is sent again by hand, as a whole."""
LINE_SIZE_MAX: Final = 5 * 1024 * 1024
"""Bytes. The longest line read from a file or stdin: about what an entry may hold."""
BATCH_MESSAGES: Final = 100
WAIT_MS: Final = 20_000
DRAIN_WAIT_MS: Final = 1_000
"""Without --follow: how long an empty topic is waited for before it counts as drained."""

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="NAME or TENANT/NAMESPACE/NAME.")]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", envvar="BINDERY_URL", help="The broker (default http://127.0.0.1:8080)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


def produce(
    topic: Topic,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Each file is one message; without: each line of stdin."),
    ] = None,
    ndjson: Annotated[
        bool,
        typer.Option("--ndjson", help="Files or stdin hold message objects, one a line, as the HTTP API takes them."),
    ] = False,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Key of the messages.")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="A property; may be repeated.")
    ] = None,
    tags: Annotated[str | None, typer.Option(metavar="TAGS", help="Tags of the messages.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send messages; returns once all are durable. A file's name travels as the property `path`."""
    from bindery.topics.broker_api import Broker, topic_path

    fields: dict[str, Any] = {"properties": _properties(properties or [])}
    if key is not None:
        fields["key"] = key
    if tags is not None:
        fields["tags"] = tags
    path = topic_path(topic) + "/messages"
    total = _Total()
    with Broker(url) as broker:
        if files and not ndjson:
            for file in files:
                total.add(_send_file(broker, path, file, fields), as_json=as_json, source=str(file))
        else:
            for name, stream in _inputs(files or []):
                for lines in _batches(stream):
                    body = b"".join(lines) if ndjson else b"".join(_message_line(line, fields) for line in lines)
                    answer = broker.request(
                        "POST", path, content=body, headers={"content-type": "application/x-ndjson"}
                    )
                    total.add(answer, as_json=as_json, source=name)
    total.finish(as_json=as_json)


class _Total:
    """Counts what was sent, says so while it goes on in a terminal, and keeps the first failure for the end."""

    def __init__(self) -> None:
        self._sent = 0
        self._failed = 0
        self._first_error = ""

    def add(self, answer: dict[str, Any], *, as_json: bool, source: str) -> None:
        """Count one answer: `message_ids` when all was written, else `results` with an id or an error for each."""
        results = answer.get("results") or [{"message_id": message_id} for message_id in answer.get("message_ids", [])]
        failed = [result["error"] for result in results if "error" in result]
        self._sent += len(results) - len(failed)
        self._failed += len(failed)
        if failed and not self._first_error:
            self._first_error = f"{failed[0].get('detail')} ({failed[0].get('code')})"
        if as_json:
            print(json.dumps({"source": source, "results": results}), flush=True)
        elif sys.stderr.isatty():
            print(f"\r{self._sent} sent", end="", file=sys.stderr, flush=True)

    def finish(self, *, as_json: bool) -> None:
        if not as_json:
            if sys.stderr.isatty():
                print("\r", end="", file=sys.stderr)
            print(f"{self._sent} message{'' if self._sent == 1 else 's'} sent")
        if self._failed:
            print(f"bindery: {self._failed} not written, the first: {self._first_error}", file=sys.stderr)
            raise typer.Exit(1)


def _properties(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise BadRequest("a property is NAME=VALUE", given=name)
    return {name: value for name, _, value in pairs}


def _send_file(broker: "Broker", path: str, file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    from urllib.parse import quote

    try:
        payload = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read {file}: {error.strerror}") from error
    properties = {"path": str(file), **fields["properties"]}
    if any(name != name.lower() or not name.isascii() or not name.isidentifier() for name in properties):
        # Header names lose their capitals on the way; such properties travel in a message object.
        line = {**fields, "properties": properties, "payload_base64": base64.b64encode(payload).decode()}
        headers, params, content = {"content-type": "application/x-ndjson"}, {}, json.dumps(line).encode()
    else:
        headers = {f"bindery-property-{name}": quote(value) for name, value in properties.items()}
        headers["content-type"] = "application/octet-stream"
        params, content = {name: value for name, value in fields.items() if name != "properties"}, payload
    answer = broker.request("POST", path, content=content, headers=headers, params=params)
    return answer if isinstance(answer, dict) else {}


def _inputs(files: list[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    if not files:
        yield "stdin", sys.stdin.buffer
    for file in files:
        try:
            with file.open("rb") as stream:
                yield str(file), stream
        except OSError as error:
            raise BadRequest(f"cannot read {file}: {error.strerror}") from error


def _batches(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """Lines of `stream`, as many as fit a request; fewer when the terminal has no more for now."""
    lines: list[bytes] = []
    size = 0
    while line := stream.readline(LINE_SIZE_MAX + 1):
        if len(line) > LINE_SIZE_MAX:
            raise BadRequest(f"a line is longer than {LINE_SIZE_MAX} bytes")
        lines.append(line)
        size += len(line)
        if len(lines) == BATCH_LINES_MAX or size > BATCH_BYTES_MAX or stream.isatty():
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def _message_line(line: bytes, fields: dict[str, Any]) -> bytes:
    payload = line.removesuffix(b"\n").removesuffix(b"\r")
    try:
        body = {"payload": payload.decode(), **fields}
    except UnicodeDecodeError:
        body = {"payload_base64": base64.b64encode(payload).decode(), **fields}
    return json.dumps(body).encode() + b"\n"


def consume(
    topic: Topic,
    subscription: Annotated[str, typer.Option("--subscription", "-s", metavar="NAME", help="Used with --ack.")] = "cli",
    ack: Annotated[
        bool,
        typer.Option(
            "--ack", help="Receive through the subscription and acknowledge; without: only look, from --start."
        ),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more; Ctrl-C ends it.")] = False,
    maximum: Annotated[int | None, typer.Option("--max", metavar="N", min=1, help="End after N messages.")] = None,
    start: Annotated[str, typer.Option(metavar="earliest|ID", help="Where to begin without --ack.")] = "earliest",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print messages: their payloads, or with --json all that is known of each.

    Without --ack nothing changes on the broker. With --ack a message is acknowledged after it was printed, so a crash
    in between shows it again, and never loses it. No topic is made: exit code 1 when there is none of that name.
    """
    from bindery.topics.broker_api import Broker, topic_path

    path = topic_path(topic)
    with Broker(url) as broker:
        if ack:
            broker.get(path)  # receiving would make the topic, a misspelt one too
        source = (
            _receive(broker, path, subscription, follow=follow, maximum=maximum)
            if ack
            else _look(broker, path, start, follow=follow, maximum=maximum)
        )
        try:
            for message in source:
                _print_message(message, as_json=as_json)
        finally:
            source.close()


def _look(
    broker: "Broker", path: str, start: str, *, follow: bool, maximum: int | None
) -> Generator[dict[str, Any], None, None]:
    """Messages from `start` on, read without a subscription."""
    left = maximum
    while left is None or left > 0:
        answer = broker.get(
            path + "/messages",
            start=start,
            max=min(BATCH_MESSAGES, left or BATCH_MESSAGES),
            wait_ms=WAIT_MS if follow else 0,
        )
        messages, start = answer["messages"], answer["next"]
        yield from messages
        if left is not None:
            left -= len(messages)
        if not messages and not follow:
            return


def _receive(
    broker: "Broker", path: str, subscription: str, *, follow: bool, maximum: int | None
) -> Generator[dict[str, Any], None, None]:
    """Messages of the subscription, each acknowledged once the caller came back for the next one.

    What was received and not handed out when the caller stops is returned to the subscription.
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
            messages = broker.post(base + "/receive", body)["messages"]
            if not messages and not follow:
                return
            pending = [message["message_id"] for message in messages]
            for message in messages:
                yield message
                printed.append(pending.pop(0))
            if left is not None:
                left -= len(messages)
            if printed:
                broker.post(base + "/ack", {"message_ids": printed, "consumer": consumer})
                printed = []
    finally:
        if printed:
            broker.post(base + "/ack", {"message_ids": printed, "consumer": consumer})
        if pending:
            broker.post(base + "/nack", {"message_ids": pending, "consumer": consumer})


def _print_message(message: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(message, ensure_ascii=False), flush=True)
        return
    payload = message.get("payload")
    raw = base64.b64decode(message["payload_base64"]) if payload is None else payload.encode()
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
