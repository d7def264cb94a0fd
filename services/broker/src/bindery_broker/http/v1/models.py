"""Bodies, query parameters and answers of the ordinary operations.

Unknown fields are refused. Times are in milliseconds; points in time count from 1970. Some operations leave fields that
were not set out of their answers.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from bindery_broker.http.v1.schemas import (
    ACKS_PER_REQUEST_MAX,
    END,
    ID_PATTERN,
    MESSAGES_PER_RECEIVE_MAX,
    MS_MAX,
    NAME_SIZE_MAX,
    NO_CONTROLS,
    PLACE_PATTERN,
    RECEIVE_BYTES_MAX,
    START_PATTERN,
    TEXT_MAX,
    WAIT_MS_MAX,
)

ENTRIES_SKIPPED_MAX: Final = 1_000_000_000
REDRIVE_MAX: Final = 1_000
"""Maximum number of dead letters that one call moves, or names."""
NAMESPACE_PATTERN: Final = r"^[-=:.A-Za-z0-9_]{1,128}/[-=:.A-Za-z0-9_]{1,128}" + END
Place = Annotated[str, Field(max_length=64, pattern=PLACE_PATTERN, examples=["earliest"])]
Text = Annotated[str, Field(max_length=TEXT_MAX)]
Tags = Annotated[
    str, Field(min_length=1, max_length=4_096, pattern=NO_CONTROLS, description="one tag, or several: `a||b`")
]


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, regex_engine="python-re", use_attribute_docstrings=True)


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, regex_engine="python-re", use_attribute_docstrings=True
    )


class Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class RoutingQuery(Query):
    redirect: bool = False
    """Answer with a 307 redirect to the broker that owns the topic, instead of forwarding the request."""
    listener: Annotated[str, Field(max_length=64)] | None = None
    """With `redirect`: the network of the client. The redirect has the owner's address of this advertised listener."""


class ForceQuery(RoutingQuery):
    force: bool = False
    """Delete even while consumers are connected."""


class ReadQuery(RoutingQuery):
    start: Annotated[str, Field(max_length=64, pattern=START_PATTERN, examples=["@1700000000000"])] = "earliest"
    """First message to return: `earliest`, `latest`, a message id; or `@` and a time in milliseconds since 1970, for
    the first message published then or later."""
    partition: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The partition to read, if the topic is partitioned."""
    max: Annotated[int, Field(ge=1, le=MESSAGES_PER_RECEIVE_MAX)] = 100
    max_bytes: Annotated[int, Field(ge=1, le=RECEIVE_BYTES_MAX)] = 4 * 2**20
    """The first message is returned whatever its size."""
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = 0
    """Maximum time to wait for a message, in milliseconds."""
    compacted: bool = False
    """Read the compacted topic: only the last message of each key, as far as the topic was compacted."""


class TopicListQuery(Query):
    namespace: Annotated[str, Field(max_length=257, pattern=NAMESPACE_PATTERN)] | None = None
    after: Annotated[str, Field(max_length=1_024)] | None = None
    max: Annotated[int, Field(ge=1, le=10_000)] = 1_000


class SubscriptionListQuery(RoutingQuery):
    after: Annotated[str, Field(max_length=1_024)] | None = None
    """Continue after this subscription."""
    max: Annotated[int, Field(ge=1, le=1_000)] = 1_000


class SubscribeBody(Body):
    initial: Literal["earliest", "latest"] = "earliest"
    tags: Tags | None = None
    subscription_properties: Annotated[dict[Text, Text], Field(max_length=100)] | None = None


class ResetBody(Body):
    initial: Literal["earliest", "latest"]
    """Where the subscription continues. `earliest` delivers every stored message again, `latest` skips all of them."""


class SeekBody(Body):
    """Exactly one of the fields is required."""

    message_id: Place | None = None
    """The next message to deliver."""
    timestamp: Annotated[int, Field(ge=0, le=MS_MAX)] | None = None
    """Continue with the first message published at this time or later."""
    percent: Annotated[float, Field(ge=0, le=100)] | None = None
    """Continue with the entry before which this share of the topic's entries is: 0 is the first entry, 100 the end."""


class SkipBody(Body):
    entries: Annotated[int, Field(ge=1, le=ENTRIES_SKIPPED_MAX)]
    """Number of entries to acknowledge, counted from the first that is not acknowledged. A batch is one entry."""


class ExpireBody(Body):
    older_than_ms: Annotated[int, Field(ge=0, le=MS_MAX)]
    """Acknowledge all messages published longer ago than this."""


class ClearBody(Body):
    """No fields."""


class BeginMoveBody(Body):
    source: Annotated[str, Field(min_length=1, max_length=4_096, pattern=NO_CONTROLS)]
    """The subscription whose messages are moved: full name of its topic, `/`, and its name."""
    subscription: Annotated[str, Field(min_length=1, max_length=255, pattern=NO_CONTROLS)]
    """The subscription of this topic that keeps the copies."""
    create: bool = False
    """Create the topic and the subscription, from the first message on, if they are missing."""


class Begun(Answer):
    epoch: str
    """For `storeCopies`."""
    end: Annotated[list[int], Field(min_length=2, max_length=2)]
    """Ledger id and entry id of the last entry, -1 if its ledger has none. Copies are stored after it."""


class UnknownBody(Body):
    message_ids: Annotated[
        list[Annotated[str, Field(max_length=64, pattern=ID_PATTERN)]],
        Field(min_length=1, max_length=ACKS_PER_REQUEST_MAX),
    ]


class UnknownIds(Answer):
    unknown: list[str]


class RequestBody(Body):
    consumer: Annotated[str, Field(min_length=1, max_length=NAME_SIZE_MAX, pattern=NO_CONTROLS)]
    request_id: Annotated[str, Field(min_length=1, max_length=256, pattern=NO_CONTROLS)]
    """That of the receive."""


class Held(Answer):
    held: bool
    """Whether the consumer holds, or held until now, messages of the answer to that receive."""


class Cancelled(Answer):
    cancelled: dict[str, Literal["cancelled", "already_delivered"]]
    """By subscription: whether the message is acknowledged there, or was delivered before."""


class ProducerAnswer(Answer):
    producer: str
    last_sequence_id: int
    """Highest sequence id that is stored of the producer; -1: none, or the producer is forgotten."""
    producer_epoch: int | None = None
    """Epoch in which the producer has the topic exclusively; null: it does not have it."""


class AccessBody(Body):
    access_mode: Literal["exclusive", "exclusive_with_fencing", "wait_for_exclusive"]
    """`exclusive`: refused while another producer has the topic. `exclusive_with_fencing`: takes it from that one.
    `wait_for_exclusive`: waits until it is free."""
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = 20_000
    """With `wait_for_exclusive`: maximum time to wait for the topic, in milliseconds."""


class AccessAnswer(Answer):
    producer: str
    producer_epoch: int
    """For the requests of the producer. It is higher than all earlier ones of the topic."""


class AccessQuery(RoutingQuery):
    producer_epoch: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Release the topic only if the producer has it in this epoch."""


class Released(Answer):
    released: bool
    """Whether the producer had the topic."""


class Sought(Answer):
    next: str | None
    """The next message to deliver; null: see `partitions`."""
    partitions: dict[str, str] = {}
    """The next message in each partition. Left out if the topic is not partitioned."""


class ConsumerInfo(Answer):
    consumer: str
    type: str | None
    """The type of the subscription, as which the consumer receives."""
    address: str
    """Address of the client, or `via` the broker that passed its last call on. Empty: unknown."""
    connected_since: int
    """When the session began, in ms since 1970."""
    unacked: int
    oldest_lease_age_ms: int | None = None
    next_timeout_in_ms: int | None = None
    session_ends_in_ms: int | None = None
    """Left out while a call is in progress."""
    calls_open: int
    """Calls in progress: those that wait for messages, and those whose messages are sent."""
    calls: int
    messages: int
    """Number of messages delivered in this session."""
    bytes: int
    """Payload bytes of these messages."""
    messages_per_s: float
    """Rate over the last 10 seconds."""
    bytes_per_s: float
    redelivered: int
    """Deliveries in this session of messages that had been delivered before."""
    acked: int
    """Messages acknowledged in calls that name this consumer, or else whose first message it held."""
    last_delivered_at: int | None
    """In ms since 1970; null: never in this session."""
    last_acked_at: int | None


class DeliveryStats(Answer):
    """Counts begin at 0 when the topic is loaded. Rates are those of the last 10 seconds. Times are in ms since 1970;
    null: never since the topic was loaded."""

    backlog_entries: int
    """Entries that are not completely acknowledged. An entry is a message or a batch."""
    backlog_bytes: int
    """Payload bytes of these entries; an estimate."""
    backlog_messages: int | None
    """Messages in these entries; null: unknown."""
    backlog_messages_exact: bool
    """False: `backlog_messages` is an estimate by the mean size of the batches published since the topic was loaded."""
    oldest_unacked_at: int | None
    """When the oldest unacknowledged message was published; null: there is none, or its entry was not read yet."""
    oldest_unacked_age_ms: int | None
    delayed: int
    """Messages that wait for their delivery time."""
    unacked: int
    """Number of messages that consumers hold."""
    blocked_on_unacked: bool
    """Whether the maximum number of unacknowledged messages is reached, so that no new ones are delivered."""
    messages_out: int
    bytes_out: int
    """Payload bytes delivered."""
    messages_out_per_s: float
    bytes_out_per_s: float
    redelivered: int
    """Deliveries of messages that had been delivered before."""
    redelivered_per_s: float
    acked: int
    """Messages that consumers acknowledged. Repeated acknowledgements count 0."""
    acked_per_s: float
    expired: int
    """Messages that the broker acknowledged because their time to live was over (policy `message_ttl_s`)."""
    evicted: int
    """Entries that the broker acknowledged because the backlog exceeded a quota."""
    last_request_at: int | None
    """When a consumer last requested messages."""
    last_delivered_at: int | None
    last_acked_at: int | None


class RetryInfo(Answer):
    """The subscription of the same name of the retry topic: `receive` delivers from it, too."""

    topic: str
    backlog_entries: int
    """Entries that are not completely acknowledged. An entry is a message or a batch."""
    backlog_messages: int | None
    """Messages in these entries; null: unknown."""
    delayed: int
    """Messages that wait for their delivery time."""
    unacked: int
    """Number of messages that consumers hold."""


class DeadLettersInfo(Answer):
    """The dead-letter topic with the default name."""

    topic: str
    backlog_entries: int
    """Entries that the subscription `dead-letters` has not acknowledged completely; without it, entries stored."""
    subscriptions: int
    """Number of subscriptions. Without any, the topic keeps no messages."""


class SubscriptionInfo(DeliveryStats):
    subscription: str
    type: str | None
    """None: no consumer has connected since the topic was loaded."""
    mark_delete: str
    """Everything up to this entry is acknowledged."""
    read_position: str
    consumers: list[ConsumerInfo]
    """Their messages include those of the retry topic."""
    tags: str | None = None
    properties: dict[str, str]
    retry: RetryInfo | None = None
    """Left out unless the retry topic is loaded and has the subscription."""
    dead_letters: DeadLettersInfo | None = None
    """Left out unless the dead-letter topic is loaded."""


class SubscriptionList(Answer):
    subscriptions: list[SubscriptionInfo]
    damaged: dict[str, str] = {}
    """Subscriptions whose stored state cannot be read, with the reason. Left out if there are none."""
    next: str | None = None
    """Value of `after` for the next call, if there are more subscriptions."""


class ExplainQuery(RoutingQuery):
    message_id: Annotated[str, Field(max_length=64, pattern=ID_PATTERN)] | None = None
    """Explain why this message is not delivered."""
    consumer: Annotated[str, Field(min_length=1, max_length=256, pattern=NO_CONTROLS)] | None = None
    """Explain why the message is not delivered to this consumer; needs `message_id`."""


class MessageExplanation(Answer):
    message_id: str
    code: str
    detail: str
    """Why the message is not delivered, in one sentence."""
    ends_in_ms: int | None = None
    """Milliseconds after which the reason ends by itself."""
    consumer: str | None = None
    """The consumer that is the reason."""
    policy: str | None = None
    """The policy that is the reason; `policies` of the answer has its value and its level."""


class PolicyInForce(Answer):
    policy: str
    value: Any
    source: Literal["topic", "namespace", "broker"]
    """The level that sets it."""
    effect: Literal["drops", "refuses", "slows", "stops"]
    detail: str
    """What it does, in one sentence."""
    acts: bool = False
    """Whether it does so now. Left out if that is not known."""
    dropped: int = 0
    """Messages (for a quota, entries) that it has acknowledged since the topic was loaded here. Left out if it
    acknowledges none."""


class Explanation(Answer):
    message: MessageExplanation | None = None
    """Left out unless the request has `message_id`."""
    subscription: SubscriptionInfo
    states: dict[str, int]
    """Number of messages read and not acknowledged, by state."""
    limits: dict[str, int]
    summary: str
    """One sentence: what is not acknowledged, and what blocks delivery."""
    blocked_by: list[str]
    """Reasons why messages are not delivered now; empty: none."""
    policies: list[PolicyInForce]
    """Policies in force that stop, slow, refuse or drop something, with their values and levels."""
    warnings: list[str] = []
    """What may lose messages. Left out if there is nothing."""


_TopicText = Annotated[str, Field(min_length=1, max_length=2_048, pattern=NO_CONTROLS)]
_KeeperName = Annotated[str, Field(min_length=1, max_length=255, pattern=NO_CONTROLS)]
_MessageIds = Annotated[
    list[Annotated[str, Field(max_length=64, pattern=ID_PATTERN)]],
    Field(min_length=1, max_length=REDRIVE_MAX),
]
_After = Annotated[str, Field(max_length=64, pattern=ID_PATTERN)]


class DeadLettersQuery(RoutingQuery):
    limit: Annotated[int, Field(ge=1, le=1_000)] = 100
    after: _After | None = None
    """Continue after this message."""
    topic: _TopicText | None = None
    """The dead-letter topic, if a policy named another one than `{topic}-{subscription}-DLQ`: `tenant/namespace/x`. Of
    its messages, those count that this subscription moved there."""
    initial_subscription: _KeeperName | None = None
    """The subscription of the dead-letter topic that keeps its messages; by default `dead-letters`."""


class DeadLetter(Answer):
    message_id: str
    """Id in the dead-letter topic."""
    origin_message_id: str | None = None
    """Id in the original topic."""
    origin_topic: str | None = None
    reconsume_times: int | None = None
    """Number of retries; left out if the message was never retried."""
    redelivery_count: int
    """How often consumers of the dead-letter topic returned it."""
    publish_time: int
    """When the message became a dead letter."""
    event_time: int | None = None
    key: str | None = None
    key_base64: str | None = None
    properties: dict[str, str]
    size: int
    """Bytes of the payload. `GET /v1/topics/.../messages/{message_id}` of the dead-letter topic returns it."""


class DeadLetterList(Answer):
    topic: str
    """The dead-letter topic."""
    messages: list[DeadLetter]
    next: str | None = None
    """Value of `after` for the next call, if messages follow."""


class RedriveBody(Body):
    max: Annotated[int, Field(ge=1, le=REDRIVE_MAX)] = 100
    """Maximum number of messages to move, unless `message_ids` names them."""
    message_ids: _MessageIds | None = None
    """Ids in the dead-letter topic."""
    after: _After | None = None
    """Continue after this message."""
    dry_run: bool = False
    """Move nothing; the answer says what would be moved."""
    topic: _TopicText | None = None
    """The dead-letter topic, if a policy named another one."""
    initial_subscription: _KeeperName | None = None


class NotRedriven(Answer):
    message_id: str
    code: str
    detail: str


class RedrivenLetters(Answer):
    topic: str
    """The retry topic."""
    moved: int
    skipped: int
    """Number of messages that had been moved, or acknowledged, before."""
    failed: int
    """Number of messages that stay dead letters because of an error."""
    failures: list[NotRedriven] = []
    """The first of them. Left out if there are none."""
    dry_run: bool
    next: str | None = None
    """Value of `after` for the next call, if messages follow."""


class PurgeBody(Body):
    message_ids: _MessageIds | None = None
    """Ids in the dead-letter topic."""
    before: Annotated[int, Field(ge=0, le=MS_MAX)] | None = None
    """Only messages that became dead letters before this time."""
    after: _After | None = None
    """Continue after this message, if the last call answered `next`."""
    topic: _TopicText | None = None
    """The dead-letter topic, if a policy named another one."""
    initial_subscription: _KeeperName | None = None


class Purged(Answer):
    topic: str
    """The dead-letter topic."""
    purged: int
    """Number of messages that were acknowledged. A batch that `message_ids` names as a whole counts as one."""
    next: str | None = None
    """Value of `after` for the next call, if not all messages were looked at."""


class TopicList(Answer):
    topics: list[str]
    partitioned: dict[str, int] = {}
    """Partitioned topics of this page, with their numbers of partitions. Their partitions are among `topics`. Left out
    if there are none."""
    next: str | None = None
    """Value of `after` for the next call, if there are more topics."""


class SubscriptionStats(DeliveryStats):
    type: str | None
    consumers: int
    """Number of connected consumers."""
    mark_delete: str


class TopicStats(Answer):
    topic: str
    owner: str
    entries: int
    size: int
    """Payload bytes of all entries."""
    ledgers: int
    first: str
    last: str
    """The last entry written; entry id `-1` if there is none."""
    terminated: bool
    """Whether the topic accepts no more messages, for good."""
    messages_in: int
    """Messages stored since the topic was loaded here."""
    bytes_in: int
    """Bytes of the entries that store them."""
    messages_out: int
    bytes_out: int
    """Payload bytes delivered since the topic was loaded here."""
    messages_in_per_s: float
    """Rates are those of the last 10 seconds."""
    bytes_in_per_s: float
    messages_out_per_s: float
    bytes_out_per_s: float
    average_message_size: float | None
    """Bytes in entries per message, over the messages since the topic was loaded here; null: there are none."""
    last_published_at: int | None
    """In ms since 1970; null: never since the topic was loaded here."""
    producers: int
    """Producers that gave their name in the last 30 seconds, or 1 if one has the topic exclusively. The policy
    `producers_max` limits them."""
    policies: list[PolicyInForce]
    """Policies in force that stop, slow, refuse or drop something, with their values and levels."""
    backlog_bytes: int
    """Payload bytes that the subscription with the largest backlog has not acknowledged; an estimate."""
    oldest_unacked_age_ms: int | None
    """The largest of the subscriptions' ages."""
    subscriptions: dict[str, SubscriptionStats]
    partitions: dict[str, Any] = {}
    """The statistics of each partition, of which the others are the sums; without `owner`, `first`, `last` and
    `mark_delete`. Left out if the topic is not partitioned."""


class LedgerRetention(Answer):
    ledger_id: int
    entries: int
    size: int
    """Payload bytes of its entries."""
    closed_at: int | None
    """In ms since 1970; null: the ledger is open."""
    code: str
    """`open`, `last`, `unsettled`, `subscription`, `compaction`, `deduplication`, `retention`, `older_kept` or
    `deletable`."""
    reason: str
    """One sentence."""
    until: int | None
    """When the retention ends, in ms since 1970; null: nobody knows."""
    subscription: str | None
    """The subscription that needs the ledger."""
    partition: int | None = None
    """The partition of a partitioned topic that the ledger belongs to; null or absent: the topic has none."""


class TopicRetention(Answer):
    topic: str
    time_s: float | None
    """Seconds after its close during which a ledger is kept that is acknowledged by all subscriptions; null: without
    limit."""
    size_max: int | None
    """Payload bytes of the topic above which acknowledged ledgers are deleted before their time; null: no limit."""
    is_policy: bool
    """Whether a policy sets the retention. Otherwise the settings of the broker do."""
    ledgers: list[LedgerRetention]
    """The oldest first."""


class Created(Answer):
    topic: str
    created: bool


class Deleted(Answer):
    deleted: str
