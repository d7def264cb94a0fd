"""`bindery produce`: send messages over the HTTP API of a broker.

A request is sent when it has `BATCH_LINES_MAX` lines or more than `BATCH_BYTES_MAX` bytes, and otherwise `LINGER_S`
after its first line was read, so that the lines of a slow writer do not wait.

Each request has an idempotency key, or sequence ids of its producer, and is repeated until all of its messages are
stored: the broker stores none of them twice. With a key that the user has chosen, the requests do not depend on the
time at which lines were read, so that a repeated command sends the same ones.
"""

import base64
import json
import os
import re
import select
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer
from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, BinderyError

from bindery.common import exit_codes
from bindery.common.options import AsJson
from bindery.common.output import counted, print_json, report_error
from bindery.common.progress import Progress
from bindery.topics.exclusive import AccessMode, exclusive_access
from bindery.topics.options import Topic, Url, parse_properties

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

BATCH_LINES_MAX: Final = 500
"""Maximum number of lines in one request."""
BATCH_BYTES_MAX: Final = 1024 * 1024
"""Size in bytes above which a request is sent; its last line may exceed it by up to LINE_SIZE_MAX."""
LINE_SIZE_MAX: Final = 5 * 1024 * 1024
"""Maximum size of a line in bytes, about the maximum size of an entry."""
LINGER_S: Final = 0.1
"""Maximum time in seconds that a line waits for more lines of its request."""
REPEAT_S: Final = 60.0
"""Maximum time in seconds for which a request is repeated. Less than the time for which a broker remembers a key."""
IN_USE: Final = "idempotency_key_in_use"
"""Code of a 409 after which a request is repeated; so it is after a temporary error, 207, and no answer."""
_READ_SIZE: Final = 256 * 1024
_LINE_PROBLEM: Final = re.compile(r"line (\d+): (.*)", re.DOTALL)
_HEADER_NAME: Final = re.compile(r"[a-z0-9_-]+")


class LineRefused(BadRequest):
    """The broker refused a line of the input. The requests before the one with this line are stored."""

    code = "line_refused"


def produce(
    topic: Topic,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            show_default=False,
            help="Files, each sent as one message; default: each line of stdin is a message.",
        ),
    ] = None,
    ndjson: Annotated[
        bool, typer.Option("--ndjson", help="Read message objects of the HTTP API, one per line, from FILE or stdin.")
    ] = False,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Key of messages that have none.")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Property of each message; repeatable.")
    ] = None,
    tags: Annotated[str | None, typer.Option(metavar="TAGS", help="Tags of each message, separated by ||.")] = None,
    deliver_after: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Deliver messages that have no delivery time later: 30s, 10m, 1h30m or 2d."),
    ] = None,
    deliver_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="The same with a time of day: 2026-12-01T08:00:00Z.")
    ] = None,
    producer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the producer, stored with each message.")
    ] = None,
    sequence_id: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Sequence id of the first message, with --producer; the others count up. Those that the producer has "
            "stored before are not stored again.",
        ),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Key of this input: if the command is repeated within five minutes, nothing is stored again.",
        ),
    ] = None,
    access: Annotated[
        AccessMode | None,
        typer.Option(
            "--access",
            help="Have the topic exclusively, with --producer, until the command ends. If another producer has it: "
            "fail, take it from that one, or wait.",
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send messages to a topic and wait until all are durable. The name of a file is sent as the property `path`.

    A line is sent at most 100 ms after it was read. If a line is refused, the command reports its number, how many
    messages were sent before it, and how to continue.

    Shared and key_shared subscriptions deliver a delayed message at its time. Exclusive and failover subscriptions keep
    the order and deliver it at once. `bindery topics cancel` cancels a message that was not delivered.

    A request without a definite answer is repeated for a minute; no message is stored twice by that. With --producer
    and --sequence-id, or --idempotency-key, the whole command can be repeated with the same input.

    Examples:

      echo hello | bindery produce greetings --key world

      bindery produce photos *.jpg

      bindery produce orders --ndjson < orders.ndjson

      echo "call back" | bindery produce reminders --deliver-after 2h

      journal | bindery produce ledger --producer till-7 --access wait_for_exclusive

    Exit codes: 0 all messages are stored, 1 some are not, 2 wrong usage.
    """
    from bindery.topics.broker_api import Broker, topic_path

    if sequence_id is not None and producer is None:
        raise BadRequest("--sequence-id needs --producer")
    if access is not None and producer is None:
        raise BadRequest("--access needs --producer")
    if sequence_id is not None and idempotency_key is not None:
        raise BadRequest("--sequence-id and --idempotency-key exclude each other")
    fields: dict[str, Any] = {"properties": parse_properties(properties or [])}
    if key is not None:
        fields["key"] = key
    if tags is not None:
        fields["tags"] = tags
    fields |= _delivery_time(deliver_after, deliver_at)
    path = topic_path(topic) + "/messages"
    total = _Total(as_json=as_json)
    try:
        with ExitStack() as stack:
            connection = stack.enter_context(Broker(url))
            epoch = None
            if access is not None:
                assert producer is not None
                epoch = stack.enter_context(exclusive_access(connection, topic, producer, access))
            broker = _Sender(
                connection, key=idempotency_key, producer=producer, sequence_id=sequence_id, producer_epoch=epoch
            )
            if files and not ndjson:
                for file in files:
                    total.add(_send_file(broker, path, file, fields), source=str(file))
            else:
                for name, stream in _inputs(files or []):
                    _send_lines(broker, path, name, stream, fields, ndjson=ndjson, total=total)
    except LineRefused:
        raise
    except BinderyError:
        if total.sent and not as_json:
            total.progress.clear()
            print(f"{total.sent_text} before this error", file=sys.stderr)
        raise
    finally:
        total.progress.clear()
    total.finish()


class _Sender:
    """Sends requests, each until all of its messages are stored, with what lets the broker recognize it."""

    def __init__(
        self,
        broker: "Broker",
        *,
        key: str | None,
        producer: str | None,
        sequence_id: int | None,
        producer_epoch: int | None = None,
    ) -> None:
        self._broker = broker
        self.lingers = key is None
        """Whether requests may depend on the time at which lines were read."""
        self._key = uuid.uuid4().hex if key is None else key
        self._producer = producer
        self._producer_epoch = producer_epoch
        self._sequence_id = sequence_id
        self._requests = 0
        self._has_answered = False

    def send(self, path: str, content: bytes, *, headers: dict[str, str], params: dict[str, Any], count: int) -> Any:
        """Return the broker's answer. `count`: number of messages. Raises the error of the last attempt."""
        self._requests += 1
        if self._producer is not None:
            params = {**params, "producer": self._producer}
        if self._producer_epoch is not None:
            params = {**params, "producer_epoch": self._producer_epoch}
        if self._sequence_id is not None:
            params = {**params, "sequence_id": self._sequence_id}
            self._sequence_id += count
        else:
            headers = {**headers, "idempotency-key": f"{self._key}-{self._requests}"}
        deadline = time.monotonic() + REPEAT_S
        backoff = Backoff(0.2, 5.0)
        while True:
            is_last = time.monotonic() >= deadline
            try:
                answer = self._broker.request("POST", path, content=content, headers=headers, params=params)
                if (
                    is_last
                    or not isinstance(answer, dict)
                    or all("error" not in one for one in answer.get("results", ()))
                ):
                    self._has_answered = True
                    return answer
            except BinderyError as error:
                if is_last or not self._may_repeat(error):
                    raise
            time.sleep(backoff.next_delay_s())

    def _may_repeat(self, error: BinderyError) -> bool:
        from bindery.topics.broker_api import BrokerRefused, BrokerUnreachable

        if isinstance(error, BrokerRefused):
            self._has_answered = True
            return error.is_temporary or error.problem.get("code") == IN_USE
        # If nothing listens at the address, it is probably wrong.
        return isinstance(error, BrokerUnreachable) and (self._has_answered or not error.is_absent)


class _Total:
    """Count sent and failed messages, show the count on a terminal, and keep the first failure for the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self.sent = 0
        self._failed = 0
        self._first_error = ""
        self.progress = Progress(is_quiet=as_json or not sys.stderr.isatty())

    @property
    def sent_text(self) -> str:
        return f"{counted(self.sent, 'message')} sent"

    def add(self, answer: dict[str, Any], *, source: str) -> None:
        """Count one response: `message_ids` if all messages are stored, else `results`, an id or error for each."""
        results = answer.get("results") or [{"message_id": message_id} for message_id in answer.get("message_ids", [])]
        failed = [result["error"] for result in results if "error" in result]
        self.sent += len(results) - len(failed)
        self._failed += len(failed)
        if failed and not self._first_error:
            self._first_error = f"{failed[0].get('detail')} ({failed[0].get('code')})"
        if self._as_json:
            print_json({"source": source, "results": results})
        else:
            self.progress.show(f"{self.sent} sent")

    def finish(self) -> None:
        """Print the totals. Raises typer.Exit if a message was not stored."""
        if not self._as_json:
            print(self.sent_text)
        if self._failed:
            report_error(
                f"{counted(self._failed, 'message')} not stored; first error: {self._first_error}",
                code="not_stored",
                as_json=self._as_json,
            )
            raise typer.Exit(exit_codes.FAILURE)


def _delivery_time(after: str | None, at: str | None) -> dict[str, int]:
    """Return the field of the delay. The broker adds `deliver_after_ms` to its own clock."""
    from bindery.common.operator import parse_duration, parse_time

    if after is not None and at is not None:
        raise BadRequest("--deliver-after and --deliver-at exclude each other")
    if after is not None:
        return {"deliver_after_ms": round(parse_duration(after) * 1_000)}
    return {} if at is None else {"deliver_at": parse_time(at)}


def _headers(properties: dict[str, str]) -> dict[str, str]:
    """Return the properties as headers. Raises BadRequest for a name that a header cannot carry."""
    from urllib.parse import quote

    for name in properties:
        if not _HEADER_NAME.fullmatch(name):
            raise BadRequest(
                "with --ndjson the name of a --property consists of lower-case letters, digits, - and _; put others "
                "into the message objects",
                given=name,
            )
    return {f"bindery-property-{name}": quote(value) for name, value in properties.items()}


def _send_file(broker: _Sender, path: str, file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read {file}: {error.strerror}") from error
    if not payload:
        print(f"warning: {file} is empty: sending an empty message", file=sys.stderr)
    properties = {"path": str(file), **fields["properties"]}
    if all(_HEADER_NAME.fullmatch(name) for name in properties):
        headers = {**_headers(properties), "content-type": "application/octet-stream"}
        params, content = {name: value for name, value in fields.items() if name != "properties"}, payload
    else:  # a header name cannot carry capitals, so such properties are sent in a message object
        line = {**fields, "properties": properties, "payload_base64": base64.b64encode(payload).decode()}
        headers, params, content = {"content-type": "application/x-ndjson"}, {}, json.dumps(line).encode()
    answer = broker.send(path, content, headers=headers, params=params, count=1)
    return answer if isinstance(answer, dict) else {}


def _send_lines(
    broker: _Sender, path: str, name: str, stream: IO[bytes], fields: dict[str, Any], *, ndjson: bool, total: _Total
) -> None:
    """Send the lines of `stream`. Raises LineRefused with the number of the line in the whole input."""
    headers = {"content-type": "application/x-ndjson"}
    params: dict[str, Any] = {}
    if ndjson:  # the broker applies these to each message of the request
        headers |= _headers(fields["properties"])
        params = {field: value for field, value in fields.items() if field != "properties"}
    first = 1
    for lines in _batches(stream, lingers=broker.lingers):
        if ndjson and not b"".join(lines).strip():
            first += len(lines)
            continue
        if ndjson and first == 1:
            _refuse_array(name, lines)
        body = b"".join(lines) if ndjson else b"".join(_message_line(line, fields) for line in lines)
        try:
            count = sum(1 for line in body.splitlines() if line and not line.isspace())
            answer = broker.send(path, body, headers=headers, params=params, count=count)
        except BinderyError as error:
            raise _refusal(error, name, first=first, total=total, ndjson=ndjson) from error
        total.add(answer, source=name)
        first += len(lines)
    if first == 1:
        print(f"warning: {name} is empty: no message was sent", file=sys.stderr)


def _refuse_array(name: str, lines: list[bytes]) -> None:
    """Raises BadRequest if the input is one JSON array instead of one object per line."""
    if next((line for line in lines if line.strip()), b"").lstrip().startswith(b"["):
        raise BadRequest(f"{name} is a JSON array; --ndjson reads one object per line: convert it with `jq -c '.[]'`")


def _refusal(error: BinderyError, name: str, *, first: int, total: _Total, ndjson: bool) -> BinderyError:
    """Return the error to raise for a request whose first line is line `first` of the input."""
    from bindery.topics.broker_api import BrokerRefused

    problem = str(error.problem.get("detail", "")) if isinstance(error, BrokerRefused) else ""
    found = _LINE_PROBLEM.match(problem)
    if found is None:
        return error
    number = first + int(found[1]) - 1
    source = "FILE" if name == "stdin" else name
    mode = " --ndjson" if ndjson else ""
    return LineRefused(
        f"{name}, line {number}: {found[2]}; {total.sent_text}, none from line {first} on. Correct the line, then "
        f"continue with `tail -n +{first} {source} | bindery produce ...{mode}`"
    )


def _inputs(files: list[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    if not files:
        yield "stdin", sys.stdin.buffer
    for file in files:
        try:
            with file.open("rb") as stream:
                yield str(file), stream
        except OSError as error:
            raise BadRequest(f"cannot read {file}: {error.strerror}") from error


def _batches(stream: IO[bytes], *, lingers: bool = True) -> Iterator[list[bytes]]:
    """Yield the lines of each request: when it is full, or, if it `lingers`, when `LINGER_S` has passed."""
    lines: list[bytes] = []
    size = 0
    for line in _lines(stream):
        if line is not None:
            lines.append(line)
            size += len(line)
        if lines and ((line is None and lingers) or len(lines) == BATCH_LINES_MAX or size > BATCH_BYTES_MAX):
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield lines with their ends, and None whenever `LINGER_S` has passed since a line was read.

    Reads the file descriptor itself: a buffered reader cannot report that no more input is available yet.
    """
    descriptor = stream.fileno()
    rest = b""
    due: float | None = None
    while True:
        timeout_s = None if due is None else max(0.0, due - time.monotonic())
        if not select.select([descriptor], [], [], timeout_s)[0] or timeout_s == 0:
            due = None
            yield None
            continue
        chunk = os.read(descriptor, _READ_SIZE)
        *whole, rest = (rest + chunk).split(b"\n")
        if max(map(len, (*whole, rest))) > LINE_SIZE_MAX:
            raise BadRequest(f"a line is longer than {LINE_SIZE_MAX} bytes")
        yield from (line + b"\n" for line in whole)
        if not chunk:
            break
        if whole and due is None:
            due = time.monotonic() + LINGER_S
    if rest:
        yield rest


def _message_line(line: bytes, fields: dict[str, Any]) -> bytes:
    payload = line.removesuffix(b"\n").removesuffix(b"\r")
    try:
        body = {"payload": payload.decode(), **fields}
    except UnicodeDecodeError:
        body = {"payload_base64": base64.b64encode(payload).decode(), **fields}
    return json.dumps(body).encode() + b"\n"
