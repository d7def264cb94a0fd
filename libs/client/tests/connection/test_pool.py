"""BookiePool: one connection per bookie and version, and no connection after it is closed."""

from bindery_core.errors import BookieUnavailable
from bindery_core.wire import v3
from bindery_core.wire.messages import ReadLacRequest
from fake_cluster import FakeCluster
from sink import LIMIT_S, Sink


async def test_a_bookie_has_one_connection_per_wire_version() -> None:
    async with FakeCluster(bookies=1) as cluster:
        pool = (await cluster.client())._pool
        (bookie_id,) = cluster.bookies
        assert pool.connection(bookie_id, 3) is pool.connection(bookie_id)
        assert pool.connection(bookie_id, 2) is not pool.connection(bookie_id)


async def test_after_close_every_request_fails_and_nothing_connects() -> None:
    async with FakeCluster(bookies=1) as cluster:
        client = await cluster.client()
        pool = client._pool
        (bookie_id,) = cluster.bookies
        await client.close()
        sink = Sink()
        request = ReadLacRequest(pool.txn_id(), 7)
        connection = pool.connection(bookie_id)
        connection.send(v3.encode_request(request), (request.txn_id,), sink, timeout_s=LIMIT_S)
        await sink.news()
        assert [type(error) for error in sink.errors] == [BookieUnavailable]
        assert not sink.batches
        assert not connection.is_connected
