import httpx
import pytest
from broker_harness import Harness


@pytest.fixture
async def pair(tree, ledgers, clock):
    """Two brokers that reach one another. Partitions of one topic belong to both, see `spread`."""
    found = [Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}") for name in ("one", "two")]
    one, two = found
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    two.peers["one"] = httpx.ASGITransport(app=one.app)
    yield found
    for broker in found:
        await broker.close()
