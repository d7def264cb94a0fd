"""Requests to the partitions of a topic, on behalf of a request to the whole topic.

Each is an ordinary request to this broker, without a connection: it runs here or goes on to the owner of the partition,
with everything that belongs to such a request (repetition after a move, limits, metrics). The headers of the request
to the topic are passed on, except for those that describe its body.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
from bindery_core.errors import BinderyError, OutcomeUnknown
from bindery_kit.admin.content_types import JSON_TYPE
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE
from bindery_pulsar.topic_name import TopicName
from starlette.responses import Response
from starlette.types import Message

from bindery_broker.http.charging.allowance import PARENT_KEY
from bindery_broker.http.exchange import PARTITION_HEADER, Exchange, Reply
from bindery_broker.http.paths import path_of
from bindery_broker.http.peers.problems import remote_error
from bindery_broker.http.peers.senders import OF_BROKERS

PARALLEL_MAX: Final = 16
"""Maximum number of requests to partitions that one request has in progress."""
_NOT_PASSED_ON: Final = frozenset(
    (
        b"accept", b"connection", b"content-encoding", b"content-length", b"content-type", b"expect", b"keep-alive",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", *OF_BROKERS,
    )
)  # fmt: skip


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return self.status < 300

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def error(self) -> BinderyError:
        """Return the error that the answer reports."""
        return remote_error(self.status, self.body)

    def reply(self) -> Response:
        """Return the answer as that of the request to the whole topic."""
        return Reply(self.status, self.body, JSON_TYPE if self.status < 400 else PROBLEM_TYPE.encode())


async def call(
    exchange: Exchange,
    method: str,
    topic: TopicName,
    path: str = "",
    *,
    query: bytes = b"",
    body: bytes | None = None,
    content_type: bytes = JSON_TYPE,
    root: str | None = None,
) -> Answer:
    """Return the answer to a request. `path`: what follows the path of the topic, percent-encoded. `root`: the path of
    the topic; None: that in the v1 API."""
    raw_path = ((path_of(topic) if root is None else root) + path).encode()
    headers = [(name, value) for name, value in exchange.scope["headers"] if name not in _NOT_PASSED_ON]
    headers.append((PARTITION_HEADER, b"1"))
    if body is not None:
        headers += [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": exchange.scope.get("scheme", "http"),
        "path": raw_path.decode(),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": exchange.scope.get("client"),
        "server": exchange.scope.get("server"),
        "state": exchange.scope.get("state", {}),
        PARENT_KEY: exchange.allowance,
    }
    status = 0
    chunks: list[bytes] = []
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.get_running_loop().create_future()  # this client never disconnects
        is_read = True
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    await exchange.at_owner.app(scope, receive, send)
    if not status:
        raise OutcomeUnknown("a partition gave no answer", topic=topic.short)
    return Answer(status, b"".join(chunks))


async def on_each(names: Sequence[TopicName], one: Callable[[TopicName], Awaitable[Answer]]) -> list[Answer]:
    """Return the answers of `one` for each partition, in their order."""
    room = asyncio.Semaphore(PARALLEL_MAX)

    async def limited(name: TopicName) -> Answer:
        async with room:
            return await one(name)

    return list(await asyncio.gather(*map(limited, names)))


def partitions_of(name: TopicName, count: int, *, start: int = 0) -> list[TopicName]:
    return [name.with_partition(index) for index in range(start, count)]


def first_failure(answers: Sequence[Answer]) -> Answer | None:
    """Return the worst answer that reports an error: an unknown outcome first; None: there is none."""
    failed = [answer for answer in answers if not answer.is_success]
    return next((answer for answer in failed if answer.status == OutcomeUnknown.status), failed[0] if failed else None)


def raise_failure(answers: Sequence[Answer]) -> None:
    """Raise the error of the first answer that reports one, if any."""
    failed = first_failure(answers)
    if failed is not None:
        _raise(failed)


def _raise(answer: Answer) -> NoReturn:
    raise answer.error()


def enter(exchange: Exchange, topic: TopicName) -> None:
    """Make the request one to a single partition."""
    rest = exchange.raw_path.strip(b"/").split(b"/")[5:]
    exchange.scope["raw_path"] = b"/".join([path_of(topic).encode(), *rest])
    exchange.scope["path_params"] = {**exchange.scope["path_params"], "topic": topic.local}
    headers = [(name, value) for name, value in exchange.scope["headers"] if name != PARTITION_HEADER]
    exchange.scope["headers"] = [*headers, (PARTITION_HEADER, b"1")]
    exchange.topic_name = topic
    exchange.forget_headers()
