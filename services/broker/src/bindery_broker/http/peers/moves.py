"""Topics that other brokers own, by requests to them: move messages there, and search them for copies.

`topics.move_targets` has the protocol. An answer with an error is taken for what it says of the request:

| status             | error          | what was stored                                  |
|--------------------|----------------|--------------------------------------------------|
| 429, 503           | TryAgain       | nothing                                          |
| other 4xx          | Conflict       | nothing: the owner refuses the copies            |
| anything else, or  | OutcomeUnknown | unknown                                          |
| no answer          |                |                                                  |
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec
from bindery_core.errors import BadRequest, BinderyError, Conflict, NoSuchTopic, OutcomeUnknown, TryAgain
from bindery_pulsar.message_codec import TAG_VALUE, OutgoingMessage
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NotOwner
from bindery_broker.http.paths import path_of
from bindery_broker.http.proxy import Proxy
from bindery_broker.retries.copies import Identity, identity_of
from bindery_broker.retries.copy_codec import encode_copies
from bindery_broker.retries.targets import Destination
from bindery_broker.topics.move_targets import Begun, Results

T = TypeVar("T")

PAGE_MESSAGES_MAX: Final = 100
PAGE_BYTES_MAX: Final = 2**20
"""Maximum number of messages, and bytes unless the first is larger, of one answer."""
COPIES_SIZE_MAX: Final = 4 * 2**20
"""Maximum bytes of the copies in one request, unless the first is larger."""
BEGIN_TIMEOUT_S: Final = 12.0
"""Maximum seconds to wait for the answer to a request that begins a move. Longer than writes in progress take."""
SILENT_S: Final = 3.0
"""Seconds for which no move begins at a broker that did not answer."""
MOVE_TIMEOUT_S: Final = 20.0
"""Maximum seconds to wait for the answer to a request that moves messages. Longer than an add takes at most."""


_LOST: Final = frozenset(("lost_ownership", "ledger_fenced", "ledger_closed", "topic_fenced"))
"""Codes of 409 with which an add may be in flight."""
_DAMAGED: Final = frozenset(("corrupt_message", "unreadable_message"))
"""Codes of an entry that cannot be decoded."""


class _Topic(msgspec.Struct):
    """The used members of `TopicStats`."""

    last: str


class _Message(msgspec.Struct):
    """The used members of `MessageOut`."""

    message_id: str
    properties: dict[str, str]
    tags: str = ""


class _Page(msgspec.Struct):
    """The used members of `ReadAnswer`."""

    messages: list[_Message]
    next: str


class _Begun(msgspec.Struct):
    """`Begun` of the API."""

    epoch: str
    end: tuple[int, int]


class _Problem(msgspec.Struct):
    """The used members of an error."""

    code: str = ""
    status: int = 500
    detail: str = ""
    facts: dict[str, Any] = {}


class _Result(msgspec.Struct):
    """`ProduceResult`."""

    message_id: str | None = None
    error: _Problem | None = None


class _Damaged(Exception):
    """An entry cannot be decoded."""

    def __init__(self, at: Position) -> None:
        super().__init__(at)
        self.at = at


class _Results(msgspec.Struct):
    """`ProducedPartly`."""

    results: list[_Result]


class Peers:
    """`topics.move_targets.Peers` over the HTTP ports of the other brokers."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._silent_until: dict[str, float] = {}
        """By URL: until when a broker that did not answer is not asked again (loop time): moves wait for each other."""

    async def begin_move(self, url: str, to: Destination, *, create: bool, source: str) -> Begun:
        body = msgspec.json.encode({"source": source, "subscription": to.subscription, "create": create})
        loop = asyncio.get_running_loop()
        if loop.time() < self._silent_until.get(url, 0.0):
            raise NotOwner("the owner of the topic did not answer before; retry", topic=to.topic.short, owner=url)
        try:
            status, answer = await self._proxy.call(
                "POST", url, path_of(to.topic) + "/moves", body, timeout_s=BEGIN_TIMEOUT_S
            )
        except (OutcomeUnknown, NotOwner) as error:  # it may have begun: what is begun next ends it
            self._silent_until[url] = loop.time() + SILENT_S
            raise NotOwner("the owner of the topic does not answer", topic=to.topic.short, owner=url) from error
        self._silent_until.pop(url, None)
        if status != 200:
            refusal = refusal_of(status, answer, to.topic, url)
            raise TryAgain(refusal.message, **refusal.facts) if isinstance(refusal, OutcomeUnknown) else refusal
        try:
            begun = msgspec.json.decode(answer, type=_Begun)
        except msgspec.MsgspecError as error:
            raise _unreadable(to.topic, url) from error
        return Begun(begun.epoch, Position(*begun.end))

    async def publish_copies(
        self, url: str, topic: TopicName, messages: Sequence[OutgoingMessage], *, source: str, epoch: str
    ) -> Results:
        """If a request fails, those that would follow are not sent: their messages have the same outcome."""
        path = f"{path_of(topic)}/moves/copies?{urlencode({'source': source, 'epoch': epoch})}"
        frames = encode_copies(messages)
        results: Results = []
        while len(results) < len(frames):
            first = last = len(results)
            size = 0
            while last < len(frames) and (last == first or size + len(frames[last]) <= COPIES_SIZE_MAX):
                size += len(frames[last])
                last += 1
            try:
                found = await self._store(url, topic, path, b"".join(frames[first:last]), count=last - first)
            except BinderyError as error:
                if not results:
                    raise
                found = [error]
            results += found
            failure = next((one for one in found if isinstance(one, BinderyError)), None)
            if failure is not None:
                results += [failure] * (len(frames) - len(results))
        return results

    async def _store(self, url: str, topic: TopicName, path: str, body: bytes, *, count: int) -> Results:
        status, answer = await self._proxy.call(
            "POST", url, path, body, content_type=b"application/octet-stream", timeout_s=MOVE_TIMEOUT_S
        )
        if status != 200:
            raise refusal_of(status, answer, topic, url)
        try:
            found = msgspec.json.decode(answer, type=_Results).results
            results = [_outcome(one, topic, url) for one in found]
        except (msgspec.MsgspecError, BadRequest) as error:
            raise OutcomeUnknown("the owner of the topic gave an answer that cannot be read", owner=url) from error
        if len(results) != count:
            raise OutcomeUnknown("the owner of the topic answered for other messages", owner=url)
        return results

    async def scan(self, url: str, topic: TopicName, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        """Yield what `retries.targets.Target.scan` yields, of a topic that the broker at `url` owns.

        Raises NoSuchTopic; TryAgain if that broker does not answer, does not own the topic, or cannot read it.
        """
        path = path_of(topic)
        try:
            ledger_id, entry_id = (await self._get(url, topic, path, _Topic)).last.split(":")
            end = Position(int(ledger_id), int(entry_id))
            start = "earliest" if after.ledger_id < 0 else f"{after.ledger_id}:{max(after.entry_id, 0)}"
            count = PAGE_MESSAGES_MAX
            while True:
                query = f"?start={start}&max={count}&max_bytes={PAGE_BYTES_MAX}"
                try:
                    page = await self._get(url, topic, f"{path}/messages{query}", _Page)
                except _Damaged as damaged:
                    if count == 1:  # it is the first entry of the page: no copy
                        start = f"{damaged.at.ledger_id}:{damaged.at.entry_id + 1}"
                        if damaged.at >= end:
                            return
                    count = 1 if count > 1 else PAGE_MESSAGES_MAX
                    continue
                for message in page.messages:
                    message_id = MessageId.parse(message.message_id)
                    if message_id.position > end:
                        return
                    if message_id.position > after and message_id.batch_index < 0:
                        tags = dict.fromkeys(filter(None, message.tags.split("||")), TAG_VALUE)
                        yield message_id.position, identity_of({**tags, **message.properties})
                if not page.messages:
                    return
                start = page.next
        except (msgspec.MsgspecError, ValueError, BadRequest) as error:
            raise _unreadable(topic, url) from error

    async def _get(self, url: str, topic: TopicName, path: str, answer: type[T]) -> T:
        try:
            status, body = await self._proxy.call("GET", url, path, timeout_s=MOVE_TIMEOUT_S)
        except OutcomeUnknown as error:
            raise NotOwner("the owner of the topic does not answer", topic=topic.short, owner=url) from error
        problem = _problem(body) if status != 200 else _Problem()
        if problem.code == NoSuchTopic.code:
            raise NoSuchTopic("no such topic", topic=topic.short)
        if problem.code in _DAMAGED and "message_id" in problem.facts:
            raise _Damaged(MessageId.parse(str(problem.facts["message_id"])).position)
        if status != 200:
            raise TryAgain("the owner of the topic cannot read it now", topic=topic.short, owner=url, status=status)
        return msgspec.json.decode(body, type=answer)


def _unreadable(topic: TopicName, url: str) -> TryAgain:
    return TryAgain("the owner of the topic gave an answer that cannot be read", topic=topic.short, owner=url)


def _outcome(result: _Result, topic: TopicName, url: str) -> MessageId | BinderyError:
    if result.message_id is not None:
        return MessageId.parse(result.message_id)
    problem = result.error or _Problem()
    return _error(problem.status, problem, topic, url)


def refusal_of(status: int, body: bytes, topic: TopicName, url: str) -> BinderyError:
    """Return the error of an answer that is not 200."""
    return _error(status, _problem(body), topic, url)


def _problem(body: bytes) -> _Problem:
    try:
        return msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        return _Problem()


def _error(status: int, problem: _Problem, topic: TopicName, url: str) -> BinderyError:
    """Return the error that stands for that of the owner."""
    detail = problem.detail or f"status {status}"
    facts = {"topic": topic.short, "owner": url, "cause": detail, "cause_code": problem.code}
    if problem.code == NoSuchTopic.code:
        return NoSuchTopic("no such topic", topic=topic.short)
    if problem.code == NotOwner.code:
        return NotOwner("the broker does not own the topic any more; retry", **facts)
    if status in (429, 503) and problem.code:  # without a code, it may be the answer of a proxy
        return TryAgain("the owner of the topic cannot store messages now; retry", **facts)
    if 400 <= status < 500 and problem.code and problem.code not in _LOST:
        return Conflict("the owner of the topic refuses the messages", **facts)
    return OutcomeUnknown("the messages may have been stored", **facts)
