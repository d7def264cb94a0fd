"""Define bodies and query parameters of hot operations, and messages, as msgspec structs.

The structs validate requests, and their schemas appear in OpenAPI. The other operations use the pydantic `models`.

Unknown fields are refused, because a misspelled `deliver_at` must not cause immediate delivery. Times are in
milliseconds; points in time count from 1970.
"""

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, in milliseconds since 1970."""
SEQUENCE_ID_MAX: Final = 2**63 - 1
MESSAGES_PER_REQUEST_MAX: Final = 10_000
MESSAGES_PER_RECEIVE_MAX: Final = 1_000
ACKS_PER_REQUEST_MAX: Final = 10_000
RECEIVE_BYTES_MAX: Final = 16 * 2**20
WAIT_MS_MAX: Final = 30_000
"""Maximum time in milliseconds that a request may wait for messages."""
ACK_TIMEOUT_MS_MAX: Final = 12 * 3_600_000
SESSION_TTL_MS_MAX: Final = 3_600_000
NACK_DELAY_MS_MAX: Final = 24 * 3_600_000
PROPERTIES_MAX: Final = 1_000
"""Maximum number of properties of a message."""
TEXT_MAX: Final = 65_536
"""Maximum characters of a key, and of the name or value of a property."""

END: Final = r"$(?![\s\S])"
"""The end of a text, in the regular expressions of Python and of JSON Schema. Python's `$` alone also matches before a
last newline."""
ID_PATTERN: Final = r"^[0-9]{1,19}:[0-9]{1,19}(:(-1|[0-9]{1,10})){0,2}" + END
"""Message id: `ledgerId:entryId:partition:batchIndex`; the last two are optional."""
PLACE_PATTERN: Final = r"^(earliest|latest|[0-9]{1,19}:[0-9]{1,19}(:(-1|[0-9]{1,10})){0,2})" + END
"""`earliest`, `latest` or a message id."""
START_PATTERN: Final = r"^(@[0-9]{1,15}|earliest|latest|[0-9]{1,19}:[0-9]{1,19}(:(-1|[0-9]{1,10})){0,2})" + END
"""A publish time (`@` and ms since 1970), or a place."""
NO_CONTROLS: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+" + END
"""Text without control characters and line separators, which could forge lines in logs and terminals."""
NAME_SIZE_MAX: Final = 256
"""Maximum characters of the name of a consumer or producer."""

Time = Annotated[int, Meta(ge=0, le=MS_MAX)]
MessageIdText = Annotated[str, Meta(max_length=64, pattern=ID_PATTERN, examples=["5:0:-1:0"])]
SubscriptionTypeName = Literal["shared", "exclusive", "failover", "key_shared"]
PRIORITY_MAX: Final = 1_000
KEY_RANGES_MAX: Final = 1_000
"""Maximum number of ranges that a consumer declares."""
KeyHash = Annotated[int, Meta(ge=0, le=65_535)]
REDELIVER_DEFAULT: Final = 16
"""Source: Pulsar's clients."""
REDELIVER_MAX: Final = 1_000_000
TopicText = Annotated[str, Meta(min_length=1, max_length=2_048, examples=["public/default/t-s-DLQ"])]
"""Name of a topic, in full or as `tenant/namespace/topic`."""
SubscriptionText = Annotated[str, Meta(min_length=1, max_length=255, pattern=NO_CONTROLS)]
ConsumerName = Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX, pattern=NO_CONTROLS)]
ProducerName = Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX, pattern=NO_CONTROLS)]
SourceName = Annotated[str, Meta(min_length=1, max_length=4_096, pattern=NO_CONTROLS)]
"""Full name of a topic, `/`, and a subscription."""
Key = Annotated[str, Meta(max_length=TEXT_MAX)]
Tags = Annotated[
    str, Meta(min_length=1, max_length=4_096, pattern=NO_CONTROLS, description="one tag, or several: `a||b`")
]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Properties = Annotated[dict[Text, Text], Meta(max_length=PROPERTIES_MAX)]


class Request(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base class of requests."""


class Answer(Struct, omit_defaults=True, kw_only=True):
    """Base class of answers."""


# -- producing


class MessageLine(Request, kw_only=True, gc=False):
    """One message of an NDJSON or JSON request. Exactly one payload field is required."""

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
    """Shared subscriptions deliver the message this time after it was received. Not allowed beside `deliver_at`."""
    deliver_at: Time | UnsetType = UNSET
    """Shared subscriptions deliver the message at this time; a time in the past is no delay."""


class RoutingQuery(Request, kw_only=True):
    redirect: bool = False
    """Answer with a 307 redirect to the broker that owns the topic, instead of forwarding the request."""
    listener: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET
    """With `redirect`: the network of the client. The redirect has the owner's address of this advertised listener."""


class ProduceQuery(RoutingQuery, kw_only=True):
    key: Annotated[str, Meta(max_length=4_096)] | UnsetType = UNSET
    """Key of a raw body, and of messages that have no key of their own."""
    tags: Tags | UnsetType = UNSET
    producer: ProducerName | UnsetType = UNSET
    producer_epoch: Annotated[int, Meta(ge=1, le=SEQUENCE_ID_MAX)] | UnsetType = UNSET
    """Epoch in which `producer` has the topic exclusively. 409 `producer_fenced` if it does not; nothing is stored."""
    event_time: Time | UnsetType = UNSET
    sequence_id: Annotated[int, Meta(ge=0, le=SEQUENCE_ID_MAX)] | UnsetType = UNSET
    """Sequence id of a raw body, or of the first message; messages without one of their own count up from it. With
    `producer`, and in each message, a message is stored once: a repeated request gets its id, or -1:-1:-1:-1 if it is
    not among the last ones of the producer. Send one request of a producer after another, each until it succeeds."""
    deliver_after_ms: Annotated[int, Meta(ge=0, le=MS_MAX)] | UnsetType = UNSET
    """Delay of a raw body, and of messages with neither of the two fields. Not allowed beside `deliver_at`."""
    deliver_at: Time | UnsetType = UNSET
    """Delivery time of a raw body, and of messages with neither of the two fields."""
    batch: bool = True
    """False: store one entry per message."""


class Produced(Answer, kw_only=True):
    message_ids: list[str]
    """In the order of the request."""


class MessageError(Answer, kw_only=True):
    code: str
    status: int
    detail: str


class ProduceResult(Answer, kw_only=True):
    """The result for one message: an id or an error."""

    message_id: str | UnsetType = UNSET
    error: MessageError | UnsetType = UNSET


class ProducedPartly(Answer, kw_only=True):
    results: list[ProduceResult]
    """One result per message, in the order of the request."""


# -- messages


class ChunkOut(Answer, kw_only=True):
    """Which part of a message the payload is."""

    uuid: str
    """Id of the message, which all its chunks have."""
    index: int
    """From 0 to `count` - 1."""
    count: int
    total_size: int
    """Bytes of all chunks together, before they were encrypted."""


class EncryptionKeyOut(Answer, kw_only=True):
    """The key of the data, itself encrypted with the key that `name` names."""

    name: str
    value_base64: str
    metadata: dict[str, str]


class EncryptionOut(Answer, kw_only=True):
    algorithm: str | UnsetType = UNSET
    """Name of the algorithm, if the producer set it. Pulsar's clients use AES-GCM."""
    param_base64: str
    """The initialization vector."""
    keys: list[EncryptionKeyOut]


class EncodingOut(Answer, kw_only=True):
    """How to decode a payload that the broker did not decode.

    Apply the steps whose field is present, in this order: decrypt (`encryption`), join the chunks (`chunk`), decompress
    (`compression`), split the batch (`batch_size`).
    """

    reason: Literal["encrypted", "chunk", "compression", "size"]
    """Why the broker did not decode it: `compression` is unknown, or `size` is above its limit."""
    batch_size: int | UnsetType = UNSET
    """Number of messages in the batch that the entry is. They are acknowledged together."""
    compression: str | UnsetType = UNSET
    """`LZ4`, `ZLIB`, `ZSTD`, `SNAPPY`, or the number of an unknown compression in Pulsar's protocol."""
    uncompressed_size: int | UnsetType = UNSET
    """Bytes of the whole message, or batch, before it was compressed."""
    chunk: ChunkOut | UnsetType = UNSET
    encryption: EncryptionOut | UnsetType = UNSET


class MessageOut(Answer, kw_only=True):
    message_id: str
    lease: str | UnsetType = UNSET
    payload: str | UnsetType = UNSET
    """Set if the bytes are valid UTF-8."""
    payload_base64: bytes | UnsetType = UNSET
    """Set if the bytes are not valid UTF-8, or if `encoding` is set."""
    encoding: EncodingOut | UnsetType = UNSET
    """Set if the broker did not decode the payload: it is encrypted, a chunk, or too large once it is decoded."""
    key: str | UnsetType = UNSET
    key_base64: bytes | UnsetType = UNSET
    properties: dict[str, str]
    tags: str | UnsetType = UNSET
    publish_time: int
    event_time: int | UnsetType = UNSET
    deliver_at: int | UnsetType = UNSET
    """Left out if the message was not delayed when it was published."""
    redelivery_count: int
    """Number of earlier negative acknowledgements and timeouts. Stored before the message is delivered again."""
    producer: str
    sequence_id: int


class Blocked(Answer, kw_only=True):
    code: str
    """`unacked_max`, `not_active`, `returned` or `unreadable`."""
    detail: str
    """What stops the consumer, in one sentence."""
    ends_in_ms: int | UnsetType = UNSET
    """Milliseconds after which the reason ends by itself."""
    consumer: str | UnsetType = UNSET
    """The consumer that is the reason."""


class Received(Answer, kw_only=True):
    messages: list[MessageOut]
    blocked: Blocked | UnsetType = UNSET
    """Why there are no messages, if something stops this consumer. Left out otherwise."""
    end_of_topic: bool = False
    """True: the topic is terminated and the subscription has acknowledged all its messages. Left out otherwise."""


class ReadAnswer(Answer, kw_only=True):
    messages: list[MessageOut]
    next: str
    """Value of `start` for the next call."""
    end_of_topic: bool = False
    """True: the topic is terminated and has no more messages. Left out otherwise."""


class LedgerOfMessage(Answer, kw_only=True):
    ledger_id: int
    entry_id: int
    state: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    ensemble: list[str]
    """Bookies of the ledger fragment that contains the entry."""
    write_set: list[str]
    """Bookies that store the entry."""


class OneMessage(Answer, kw_only=True):
    message: MessageOut
    batch_size: int
    ledger: LedgerOfMessage


# -- subscriptions


class KeyShared(Request, kw_only=True):
    mode: Literal["auto_split", "sticky"] = "auto_split"
    """`auto_split`: the broker shares all keys among the consumers. `sticky`: each consumer names its own `ranges`."""
    ranges: Annotated[list[tuple[KeyHash, KeyHash]], Meta(max_length=KEY_RANGES_MAX)] = []
    """Ranges of key hashes, first and last included, of a consumer in the mode `sticky`."""
    allow_out_of_order: bool = False
    """Deliver messages of a key even while another consumer holds earlier ones."""


class DeadLetterPolicy(Request, kw_only=True):
    max_redeliver: Annotated[int, Meta(ge=0, le=REDELIVER_MAX)] = REDELIVER_DEFAULT
    """Largest redelivery count with which a message is delivered. A message that was returned more often, or whose
    lease expired more often, goes to the dead-letter topic. At the limit, each message is delivered alone."""
    topic: TopicText | UnsetType = UNSET
    """Dead-letter topic; left out: `{topic}-{subscription}-DLQ`, without the partition of the topic."""
    initial_subscription: SubscriptionText | UnsetType = UNSET
    """Subscription with which the dead-letter topic is created, so that it keeps its messages; left out:
    `dead-letters`."""


class ReceiveBody(Request, kw_only=True):
    consumer: ConsumerName
    """Name of the consumer, unique in the subscription. It identifies the consumer over several calls."""
    type: SubscriptionTypeName = "shared"
    """`shared`: every consumer gets other messages. `key_shared`: the same, and the messages of a key in order to one
    consumer. `failover`: all messages in order to one of the consumers. `exclusive`: there is one consumer."""
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] = 0
    """Consumers with a lower number are preferred (shared and failover)."""
    key_shared: KeyShared | UnsetType = UNSET
    """How consumers share the keys, if `type` is `key_shared`. All consumers of a subscription say the same."""
    durable: bool = True
    """Whether the subscription is stored. Otherwise it ends with its last consumer, and keeps no messages for it."""
    initial: Literal["earliest", "latest"] = "earliest"
    """First message of the subscription, if this call creates it."""
    max: Annotated[int, Meta(ge=1, le=MESSAGES_PER_RECEIVE_MAX)] = 100
    max_bytes: Annotated[int, Meta(ge=1, le=RECEIVE_BYTES_MAX)] = 4 * 2**20
    """The first message is returned whatever its size."""
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 20_000
    """Maximum time to wait for the first message, in milliseconds."""
    ack_timeout_ms: Annotated[int, Meta(ge=100, le=ACK_TIMEOUT_MS_MAX)] = 30_000
    """Milliseconds after which a message that is not acknowledged is delivered again."""
    session_ttl_ms: Annotated[int, Meta(ge=1_000, le=SESSION_TTL_MS_MAX)] = 60_000
    """Milliseconds after its last call until the consumer leaves the subscription."""
    request_id: Annotated[str, Meta(min_length=1, max_length=256, pattern=NO_CONTROLS)] | UnsetType = UNSET
    """A repeated call with the same id returns the same messages, if this consumer still holds them."""
    ack: Annotated[list[MessageIdText], Meta(min_length=1, max_length=ACKS_PER_REQUEST_MAX)] | UnsetType = UNSET
    """Acknowledge these messages first, durably, as POST .../ack does: one call instead of two. If that fails, no
    message is delivered."""
    redeliver: bool = False
    """Return the messages that this consumer still holds before delivering any: for a consumer that has restarted."""
    dead_letter: DeadLetterPolicy | UnsetType = UNSET
    """Move messages that were delivered too often to a dead-letter topic, each exactly once (`shared` and `key_shared`
    only). Left out: they are delivered again, however often."""
    tags: Tags | UnsetType = UNSET
    """Deliver only messages with one of these tags or without tags. Fixed when the subscription is created."""
    subscription_properties: Annotated[dict[Text, Text], Meta(max_length=100)] | UnsetType = UNSET
    """Properties of the subscription, if this call creates it."""


class ReceiveQuery(RoutingQuery, kw_only=True):
    create: bool = True
    """Create the topic and the subscription if they are missing. Otherwise that is an error (404)."""


class StreamQuery(RoutingQuery, kw_only=True):
    consumer: ConsumerName
    type: SubscriptionTypeName = "shared"
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] = 0
    """Consumers with a lower number are preferred (shared and failover)."""
    ack_timeout_ms: Annotated[int, Meta(ge=100, le=ACK_TIMEOUT_MS_MAX)] = 30_000
    session_ttl_ms: Annotated[int, Meta(ge=1_000, le=SESSION_TTL_MS_MAX)] = 60_000
    tags: Tags | UnsetType = UNSET
    """Fail unless the subscription was created with these tags."""


class AckBody(Request, kw_only=True):
    """Either single messages, or everything up to one (exclusive and failover subscriptions only)."""

    message_ids: Annotated[list[MessageIdText], Meta(min_length=1, max_length=ACKS_PER_REQUEST_MAX)] | UnsetType = UNSET
    cumulative: MessageIdText | UnsetType = UNSET
    consumer: ConsumerName | UnsetType = UNSET
    """Extends the session of this consumer."""


class Acknowledged(Answer, kw_only=True):
    acknowledged: int
    """Number of message ids that are durably acknowledged, repeated ones included."""


class NackBody(Request, kw_only=True):
    message_ids: Annotated[list[MessageIdText], Meta(min_length=1, max_length=ACKS_PER_REQUEST_MAX)]
    delay_ms: Annotated[int, Meta(ge=0, le=NACK_DELAY_MS_MAX)] = 0
    consumer: ConsumerName | UnsetType = UNSET
    """Return only messages that this consumer holds."""


class RetryBody(Request, kw_only=True):
    message_ids: Annotated[list[MessageIdText], Meta(min_length=1, max_length=ACKS_PER_REQUEST_MAX)]
    delay_ms: Annotated[int, Meta(ge=0, le=MS_MAX)] = 0
    """Delay of the next delivery, in milliseconds. The setting `delayed_delivery_max_delay_s` limits it."""
    properties: Properties = {}
    """Properties to add to the copies, or to replace."""
    consumer: ConsumerName | UnsetType = UNSET
    """Extends the session of this consumer."""
    max_redeliver: Annotated[int, Meta(ge=0, le=REDELIVER_MAX)] = REDELIVER_DEFAULT
    """Maximum number of retries of a message. After that, a retry moves it to the dead-letter topic."""
    dead_letter_topic: TopicText | UnsetType = UNSET
    """Left out: `{topic}-{subscription}-DLQ`, without the partition of the topic."""


class MovedOut(Answer, kw_only=True):
    message_id: str
    """Id of the original, which is acknowledged."""
    topic: str
    """Topic of the copy: the retry topic or the dead-letter topic."""
    copy_id: str
    """Id of the copy."""
    reconsume_times: int
    """Number of retries of the message, this one included: the property RECONSUMETIMES of the copy."""


class NotMoved(Answer, kw_only=True):
    message_id: str
    error: MessageError


class Retried(Answer, kw_only=True):
    moved: list[MovedOut]
    acknowledged: list[str]
    """Messages that were acknowledged before. They were not copied."""
    failed: list[NotMoved]
    """Messages that were not moved, or of which that is not known yet (status 504). They are delivered again later,
    unless it turns out that they were moved."""


class Returned(Answer, kw_only=True):
    returned: list[str]
    """Messages that will be delivered again. A message that no consumer holds (its lease has expired) is left out."""
