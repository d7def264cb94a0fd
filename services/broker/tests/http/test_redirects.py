"""Redirects to the owner's address for the network of the client."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.settings import BrokerSettings
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Clock, Harness, problem

ADMIN = "/admin/v2/persistent/public/default/t/stats"
BUNDLE = Bundle.of(TopicName.parse("public/default/t"))
LISTENERS = {
    "one": "external:https://one.example.com:8443,external:http://one.example.com,lan:http://10.0.0.1:8080",
    "two": "external:https://two.example.com:8443,external:http://two.example.com,shared:http://brokers.example.com",
    "three": "shared:http://brokers.example.com",
}


@pytest.fixture
async def brokers(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> AsyncIterator[dict[str, Harness]]:
    found = {
        name: Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}", advertised_listeners=listeners)
        for name, listeners in LISTENERS.items()
    }
    for harness in found.values():
        for name, other in found.items():
            harness.peers[name] = httpx.ASGITransport(app=other.app)
    yield found
    for harness in found.values():
        await harness.close()


async def location(harness: Harness, query: str, *, path: str = TOPIC, base: str = "") -> str | None:
    """Return where a request is redirected to, without its path; None: it was passed on."""
    answer = await harness.client.get(f"{base}{path}?{query}")
    if answer.status_code == 200:
        return None
    assert answer.status_code == 307, answer.text
    found, _, rest = answer.headers["location"].partition(path)
    assert rest == f"?{query}"
    return found


async def test_a_client_that_names_a_listener_gets_the_address_of_the_owner(brokers: dict[str, Harness]) -> None:
    await brokers["one"].produce("a")
    two = brokers["two"]
    assert await location(two, "redirect=true") == "http://one"
    assert await location(two, "redirect=true&listener=external") == "http://one.example.com"
    secure = await location(two, "redirect=true&listener=external", base="https://two")
    assert secure == "https://one.example.com:8443"
    assert await location(two, "redirect=true&listener=lan", base="https://two") == "http://10.0.0.1:8080"
    assert await location(two, "listener=external") is None
    assert await location(two, "redirect=false&listener=external") is None
    assert await location(brokers["one"], "redirect=true&listener=nothing") is None


@pytest.mark.parametrize("redirect", ["1", "True", "yes"])
async def test_all_forms_of_true_redirect(brokers: dict[str, Harness], redirect: str) -> None:
    await brokers["one"].produce("a")
    assert await location(brokers["two"], f"redirect={redirect}") == "http://one"


async def test_a_value_that_looks_like_the_parameter_redirects_nothing(brokers: dict[str, Harness]) -> None:
    await brokers["one"].produce("a")
    query = "key=redirect=true"
    answer = await brokers["two"].client.post(f"{TOPIC}/messages?{query}", content=b"b")
    assert answer.status_code == 200


async def test_a_name_that_the_owner_does_not_have_is_refused_with_those_that_it_has(
    brokers: dict[str, Harness],
) -> None:
    await brokers["one"].produce("a")
    answer = await brokers["two"].client.get(f"{TOPIC}?redirect=true&listener=shared")
    found = problem(answer, status=400, code="bad_request")
    assert found["facts"] == {"listener": "shared", "owner": "http://one", "known": ["external", "lan"]}
    answer = await brokers["two"].client.get(f"{ADMIN}?redirect=true&listenerName=shared")
    assert answer.status_code == 400
    assert "no listener of this name" in answer.json()["reason"]
    answer = await brokers["two"].client.get(f"{TOPIC}?redirect=true&listener={'x' * 65}")
    assert answer.status_code == 400


async def test_the_address_of_the_request_chooses_the_listener(brokers: dict[str, Harness]) -> None:
    await brokers["one"].produce("a")
    two = brokers["two"]
    assert await location(two, "redirect=true", base="http://two.example.com") == "http://one.example.com"
    assert await location(two, "redirect=true", base="http://TWO.example.com:80") == "http://one.example.com"
    assert await location(two, "redirect=true", base="https://two.example.com:8443") == "https://one.example.com:8443"
    assert await location(two, "redirect=true", base="http://brokers.example.com") == "http://one"
    assert await location(two, "redirect=true", base="http://elsewhere") == "http://one"
    assert await location(two, "redirect=true&listener=lan", base="http://two.example.com") == "http://10.0.0.1:8080"


async def test_an_address_that_brokers_share_redirects_nobody_to_itself(brokers: dict[str, Harness]) -> None:
    await brokers["three"].produce("a")
    two = brokers["two"]
    assert await location(two, "redirect=true", base="http://brokers.example.com") is None
    assert await location(two, "redirect=true&listener=shared") is None
    assert await location(two, "redirect=true") == "http://three"


async def test_pulsars_calls_name_it_listenerName(brokers: dict[str, Harness]) -> None:
    await brokers["one"].produce("a")
    two = brokers["two"]
    assert await location(two, "redirect=true&listenerName=lan", path=ADMIN) == "http://10.0.0.1:8080"


async def test_a_pulsar_broker_is_named_by_its_listener(brokers: dict[str, Harness]) -> None:
    record = {
        "nativeUrl": "pulsar://four:6650",
        "httpUrl": "http://four",
        "disabled": False,
        "advertisedListeners": {"external": {"brokerHttpUrl": "http://four.example.com:8080"}},
    }
    one = brokers["one"]
    await one.produce("a")
    assert (
        await one.post(f"/v1/namespaces/public/default/unload?bundle={BUNDLE.name}&hold_s=0", {})
    ).status_code == 200
    await one.store.create(BUNDLE.owner_path, json.dumps(record).encode(), ephemeral=True, make_parents=True)
    two = brokers["two"]
    assert await location(two, "a=b", path=ADMIN) == "http://four"
    assert await location(two, "listenerName=external", path=ADMIN) == "http://four.example.com:8080"
    assert await location(two, "a=b", path=ADMIN, base="http://two.example.com") == "http://four.example.com:8080"
    assert (await two.client.get(f"{ADMIN}?listenerName=lan")).status_code == 400


def test_no_listeners_are_the_default() -> None:
    assert BrokerSettings().listeners == {}
