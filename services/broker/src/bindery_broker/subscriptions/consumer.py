"""One call of a consumer (its limits and when it ends), and the filter of its subscription."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
from bindery_pulsar.message_codec import Message

from bindery_broker.dispatch.key_ranges import KeyRange
from bindery_broker.dispatch.key_shared import AUTO_SPLIT, KeySharedMode
from bindery_broker.dispatch.sessions import Session
from bindery_broker.retries.targets import Destination
from bindery_broker.subscriptions.response_budget import Charge

SubscriptionType = Literal["shared", "exclusive", "failover", "key_shared"]

TAG_VERSION = "1"
"""Value of the subscription properties whose keys are tags (the convention of TDMQ's clients)."""
_NO_TAGS: Final[frozenset[str]] = frozenset()


class DeadLetters(NamedTuple):
    """When messages are moved to a dead-letter topic instead of being delivered. Shared and key_shared only."""

    max_redeliver: int
    """Largest redelivery count with which a message is delivered."""
    to: Destination


class ReceiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for messages; times in seconds."""

    consumer: str
    count_max: int
    bytes_max: int
    wait_s: float
    ack_timeout_s: float
    session_ttl_s: float
    request_id: str | None = None
    redeliver: bool = False
    priority: int = 0
    """Priority of the consumer; 0 is served first."""
    key_shared: KeySharedMode = AUTO_SPLIT
    key_ranges: tuple[KeyRange, ...] = ()
    """Ranges of key hashes that the consumer declares, if the mode is sticky."""
    dead_letters: DeadLetters | None = None
    address: str = ""
    """The client's address, for statistics."""


class ClientWatch:
    """Whether the client of calls has disconnected. A call that waits is ended at once, and no other one."""

    __slots__ = ("_end", "is_gone", "on_wait")

    def __init__(self) -> None:
        self.is_gone = False
        self.on_wait: Callable[[], None] | None = None
        """Called when a call begins to wait, which most calls never do. From then on, `set_gone` is called."""
        self._end: Callable[[], None] | None = None
        """Ends the wait of the call in progress."""

    def look(self) -> None:
        """Learn from now on whether the client has disconnected."""
        if self.on_wait is not None:
            self.on_wait()

    def begin_wait(self, end: Callable[[], None]) -> None:
        """A call waits from now on; `end` ends its wait, and is called at once if the client has disconnected."""
        self._end = end
        if self.is_gone:
            end()
        else:
            self.look()

    def waited(self) -> None:
        """The call does not wait any more."""
        self._end = None

    def set_gone(self) -> None:
        self.is_gone = True
        self.end_wait()

    def end_wait(self) -> None:
        """End the wait of the call in progress, if there is one, with the messages that it already has."""
        if self._end is not None:
            self._end()


class ReceiveCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request in progress."""

    request: ReceiveRequest
    session: Session
    deadline: float
    """Time until which the call waits for messages, in monotonic seconds."""
    client: ClientWatch | None
    """Whether the client has disconnected. No messages are leased to it then. None: the call does not wait."""
    charge: Charge
    """The bytes of the response; its owner releases it."""


class MessageFilter:
    """Which messages a subscription delivers: those with its tags, and in a retry topic those of its own.

    The tags of a subscription are the property keys whose value is `TAG_VERSION`.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        *,
        is_foreign: Callable[[Mapping[str, str]], bool] | None = None,
        is_kept: Callable[[Mapping[str, str]], bool] = lambda _properties: False,
    ) -> None:
        """`is_foreign`: whether a message with these properties belongs to another subscription, so that consumers of
        this one do not receive it; None: no message does. `is_kept`: whether that other subscription keeps it."""
        self.is_foreign = is_foreign
        self._is_kept = is_kept
        self.tags = frozenset(name for name, value in properties.items() if value == TAG_VERSION) or _NO_TAGS
        """Tags to deliver. If there are none, or if `*` is one of them, all messages are delivered."""
        self._required = self.tags if "*" not in self.tags else _NO_TAGS

    @property
    def is_active(self) -> bool:
        """Whether some messages may not match because of their tags."""
        return bool(self._required)

    def matching(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages that match. A message without tags matches all tags."""
        is_foreign = self.is_foreign
        if is_foreign is not None:
            messages = [message for message in messages if not is_foreign(message.properties)]
        required = self._required
        if not required:
            return messages
        return [message for message in messages if not (tags := message.tags) or not tags.isdisjoint(required)]

    def split(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return the messages that match, and those of the others that this subscription does not need any more.

        Those in neither are foreign messages that nothing else keeps.
        """
        matching = self.matching(messages)
        if len(matching) == len(messages):
            return matching, ()
        offered = {message.batch_index for message in matching}
        others = [message for message in messages if message.batch_index not in offered]
        is_foreign = self.is_foreign
        if is_foreign is None:
            return matching, others
        return matching, [one for one in others if not is_foreign(one.properties) or self._is_kept(one.properties)]
