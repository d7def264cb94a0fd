"""Bodies and query parameters of hot operations, and messages. They validate and describe themselves in OpenAPI.

The other operations' are pydantic `models`.

Unknown fields are refused: a misspelled `delay` must not become an undelayed message. Times are milliseconds; those
that name a moment count from 1970.
"""

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999."""
SEQUENCE_ID_MAX: Final = 2**63 - 1
MESSAGES_PER_REQUEST_MAX: Final = 10_000
MESSAGES_PER_RECEIVE_MAX: Final = 1_000
ACKS_PER_REQUEST_MAX: Final = 10_000
RECEIVE_BYTES_MAX: Final = 16 * 2**20
WAIT_MS_MAX: Final = 30_000
ACK_TIMEOUT_MS_MAX: Final = 12 * 3_600_000
SESSION_TTL_MS_MAX: Final = 3_600_000
NACK_DELAY_MS_MAX: Final = 24 * 3_600_000
PROPERTIES_MAX: Final = 1_000
TEXT_MAX: Final = 65_536

ID_PATTERN: Final = r"^[0-9]{1,19}:[0-9]{1,19}(:(-1|[0-9]{1,10})){0,2}$"
PLACE_PATTERN: Final = r"^(earliest|latest|[0-9]{1,19}:[0-9]{1,19}(:(-1|[0-9]{1,10})){0,2})$"
NO_CONTROLS: Final = r"^[^\x00-\x1f\x7f]+$"

Time = Annotated[int, Meta(ge=0, le=MS_MAX)]
MessageIdText = Annotated[str, Meta(max_length=64, pattern=ID_PATTERN, examples=["5:0:-1:0"])]
ConsumerName = Annotated[str, Meta(min_length=1, max_length=256, pattern=NO_CONTROLS)]
ProducerName = Annotated[str, Meta(min_length=1, max_length=256, pattern=NO_CONTROLS)]
Key = Annotated[str, Meta(max_length=TEXT_MAX)]
Tags = Annotated[str, Meta(min_length=1, max_length=4_096, description="one tag, or several: `a||b`")]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Properties = Annotated[dict[Text, Text], Meta(max_length=PROPERTIES_MAX)]


class Request(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base of what clients send."""


class Answer(Struct, omit_defaults=True, kw_only=True):
    """Base of what they get."""


# -- producing


class MessageLine(Request, kw_only=True, gc=False):
    """One message of an NDJSON or JSON request. Exactly one of the payload fields."""

    payload: str | UnsetType = UNSET
    payload_json: Raw | UnsetType = UNSET
    """Stored as its JSON text."""
    payload_base64: bytes | UnsetType = UNSET
    key: Key | UnsetType = UNSET
    properties: Properties | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    event_time: Time | UnsetType = UNSET
    sequence_id: Annotated[int, Meta(ge=0, le=SEQUENCE_ID_MAX)] | UnsetType = UNSET
    deliver_after_ms: Annotated[int, Meta(ge=0, le=MS_MAX)] | UnsetType = UNSET
    """Not supported yet: more than 0 is refused."""
    deliver_at: Time | UnsetType = UNSET
    """Not supported yet: a moment to come is refused."""


class RoutingQuery(Request, kw_only=True):
    redirect: bool = False
    """Answer 307 to the topic's owner instead of passing the request on."""


class ProduceQuery(RoutingQuery, kw_only=True):
    key: Annotated[str, Meta(max_length=4_096)] | UnsetType = UNSET
    """For a raw body; for many messages: of those without their own."""
    tags: Tags | UnsetType = UNSET
    producer: ProducerName | UnsetType = UNSET
    event_time: Time | UnsetType = UNSET
    sequence_id: Annotated[int, Meta(ge=0, le=SEQUENCE_ID_MAX)] | UnsetType = UNSET
    """Of a raw body."""
    deliver_after_ms: Annotated[int, Meta(ge=0, le=MS_MAX)] | UnsetType = UNSET
    """Not supported yet: more than 0 is refused."""
    deliver_at: Time | UnsetType = UNSET
    """Not supported yet: a moment to come is refused."""
    batch: bool = True
    """False: one entry for each message."""


class Produced(Answer, kw_only=True):
    message_ids: list[str]
    """In the order of the request."""


class MessageError(Answer, kw_only=True):
    code: str
    status: int
    detail: str


class ProduceResult(Answer, kw_only=True):
    """What became of one message: it has an id, or an error."""

    message_id: str | UnsetType = UNSET
    error: MessageError | UnsetType = UNSET


class ProducedPartly(Answer, kw_only=True):
    results: list[ProduceResult]
    """One for each message, in the order of the request."""


# -- messages


class MessageOut(Answer, kw_only=True):
    message_id: str
    lease: str | UnsetType = UNSET
    payload: str | UnsetType = UNSET
    """When the bytes are valid UTF-8."""
    payload_base64: bytes | UnsetType = UNSET
    """Otherwise."""
    key: str | UnsetType = UNSET
    key_base64: bytes | UnsetType = UNSET
    properties: dict[str, str]
    tags: str | UnsetType = UNSET
    publish_time: int
    event_time: int | UnsetType = UNSET
    redelivery_count: int
    """How often it was returned or ran out of time before. Kept in memory: 0 again once the topic was loaded anew."""
    producer: str
    sequence_id: int


class Received(Answer, kw_only=True):
    messages: list[MessageOut]


class ReadAnswer(Answer, kw_only=True):
    messages: list[MessageOut]
    next: str
    """`start` of the next call."""


class LedgerOfMessage(Answer, kw_only=True):
    ledger_id: int
    entry_id: int
    state: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    ensemble: list[str]
    """Bookies of this part of the ledger."""
    write_set: list[str]
    """Those that hold this entry."""


class OneMessage(Answer, kw_only=True):
    message: MessageOut
    batch_size: int
    ledger: LedgerOfMessage


# -- subscriptions


class ReceiveBody(Request, kw_only=True):
    consumer: ConsumerName
    """A name that is this consumer's own: it keeps its place in the subscription from call to call."""
    type: Literal["shared", "exclusive", "failover", "key_shared"] = "shared"
    """`failover` and `key_shared` are not supported yet."""
    initial: Literal["earliest", "latest"] = "earliest"
    """Where the subscription begins, if this call makes it."""
    max: Annotated[int, Meta(ge=1, le=MESSAGES_PER_RECEIVE_MAX)] = 100
    max_bytes: Annotated[int, Meta(ge=1, le=RECEIVE_BYTES_MAX)] = 4 * 2**20
    """One message is answered whatever its size."""
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 20_000
    """Wait so long for the first message."""
    ack_timeout_ms: Annotated[int, Meta(ge=100, le=ACK_TIMEOUT_MS_MAX)] = 30_000
    """A message that is not acknowledged for so long is delivered again."""
    session_ttl_ms: Annotated[int, Meta(ge=1_000, le=SESSION_TTL_MS_MAX)] = 60_000
    """The consumer stays a member so long after its last call."""
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | UnsetType = UNSET
    """A repeated call with the same id answers the same messages, as far as they are still this consumer's."""
    redeliver: bool = False
    """First return what this consumer still holds: for a consumer that begins anew under its old name."""
    tags: Tags | UnsetType = UNSET
    """Only messages with one of these tags, and those without any. Fixed when the subscription is made."""
    subscription_properties: Annotated[dict[Text, Text], Meta(max_length=100)] | UnsetType = UNSET
    """Kept with the subscription that this call makes."""


class StreamQuery(RoutingQuery, kw_only=True):
    consumer: ConsumerName
    type: Literal["shared", "exclusive", "failover", "key_shared"] = "shared"
    """`failover` and `key_shared` are not supported yet."""
    initial: Literal["earliest", "latest"] = "earliest"
    ack_timeout_ms: Annotated[int, Meta(ge=100, le=ACK_TIMEOUT_MS_MAX)] = 30_000
    session_ttl_ms: Annotated[int, Meta(ge=1_000, le=SESSION_TTL_MS_MAX)] = 60_000
    tags: Tags | UnsetType = UNSET


class AckBody(Request, kw_only=True):
    """Either single messages, or everything up to one (exclusive subscriptions only)."""

    message_ids: Annotated[list[MessageIdText], Meta(min_length=1, max_length=ACKS_PER_REQUEST_MAX)] | UnsetType = UNSET
    cumulative: MessageIdText | UnsetType = UNSET
    consumer: ConsumerName | UnsetType = UNSET
    """Keeps this consumer's session alive."""


class Acknowledged(Answer, kw_only=True):
    acknowledged: int
    """Message ids that are durably acknowledged, repeated ones included."""


class NackBody(Request, kw_only=True):
    message_ids: Annotated[list[MessageIdText], Meta(min_length=1, max_length=ACKS_PER_REQUEST_MAX)]
    delay_ms: Annotated[int, Meta(ge=0, le=NACK_DELAY_MS_MAX)] = 0
    consumer: ConsumerName | UnsetType = UNSET
    """Only messages that this consumer holds."""


class Returned(Answer, kw_only=True):
    returned: list[str]
    """Messages that were held and will be delivered again. What nobody held (a lease ran out) is left out."""
