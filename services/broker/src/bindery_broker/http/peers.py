"""Read topics that other brokers own, by requests to them. Used to settle moves; see `topics.move_targets`."""

from collections.abc import AsyncIterator
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
from bindery_core.errors import BadRequest, NoSuchTopic, TryAgain
from bindery_pulsar.message_codec import TAG_VALUE
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.http.proxy import Proxy
from bindery_broker.retries.copies import Identity, identity_of

T = TypeVar("T")

PAGE_MESSAGES_MAX: Final = 100
PAGE_BYTES_MAX: Final = 2**20
"""Maximum number of messages, and bytes unless the first is larger, of one answer."""


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


class Peers:
    """`topics.move_targets.Peers` over the HTTP ports of the other brokers."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def scan(self, url: str, topic: TopicName, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        """Yield what `retries.targets.Target.scan` yields, of a topic that the broker at `url` owns.

        Raises NoSuchTopic; TryAgain if that broker does not answer, does not own the topic, or cannot read it.
        """
        path = "/v1/topics/" + "/".join(quote(part, safe="") for part in (topic.tenant, topic.namespace, topic.local))
        try:
            ledger_id, entry_id = (await self._get(url, topic, path, _Topic)).last.split(":")
            end = Position(int(ledger_id), int(entry_id))
            start = "earliest" if after.ledger_id < 0 else f"{after.ledger_id}:{max(after.entry_id, 0)}"
            while True:
                query = f"?start={start}&max={PAGE_MESSAGES_MAX}&max_bytes={PAGE_BYTES_MAX}"
                page = await self._get(url, topic, f"{path}/messages{query}", _Page)
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
            raise TryAgain(
                "the owner of the topic gave an answer that cannot be read", topic=topic.short, owner=url
            ) from error

    async def _get(self, url: str, topic: TopicName, path: str, answer: type[T]) -> T:
        status, body = await self._proxy.get(url, path)
        if status == 404:
            raise NoSuchTopic("no such topic", topic=topic.short)
        if status != 200:
            raise TryAgain("the owner of the topic cannot read it now", topic=topic.short, owner=url, status=status)
        return msgspec.json.decode(body, type=answer)
