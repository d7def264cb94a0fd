"""Calls that terminate topics: what is stored stays readable, and nothing can be added any more.

Both calls can be repeated: a topic that is terminated is answered as such. So a `partitioned-terminate` that fails at
one of the partitions is completed by the next one. Source: Pulsar PersistentTopicsBase.
"""

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin.calls import ANY_TOPIC, TOPIC, Refused, answer, call, named, topic_of
from bindery_broker.http.admin.on_partitions import at_each
from bindery_broker.http.exchange import Exchange

router: Final = APIRouter()
NO_PARTITION: Final = -1
"""What Pulsar answers for partitions, too."""


@call(router, "POST", TOPIC + "/terminate", "adminTerminate")
async def terminate(exchange: Exchange) -> Response:
    """Terminate the topic. Returns the id of its last entry; `entryId` -1: the last ledger is empty."""
    topic = await topic_of(exchange)
    last = await topic.ledger.terminate()
    return answer({"ledgerId": last.ledger_id, "entryId": last.entry_id, "partitionIndex": NO_PARTITION})


@call(router, "POST", ANY_TOPIC + "/terminate/partitions", "adminTerminatePartitions")
async def terminate_partitions(exchange: Exchange) -> Response:
    """Terminate each partition of a partitioned topic. Returns the ids of their last entries by partition."""
    name = named(exchange)
    record = await exchange.broker.partitioned.find_now(name)
    if record is None:
        reason = "Termination of a non-partitioned topic is not allowed using partitioned-terminate"
        raise Refused(405, f"{reason}, please use terminate commands")
    answers = await at_each(exchange, record, "POST", "/terminate", body=b"")
    return answer({str(partition.partition): one.json() for partition, one in answers.items()})
