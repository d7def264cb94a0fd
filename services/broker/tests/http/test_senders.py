"""Which requests count as those of other brokers, and that others cannot use the headers of brokers."""

from typing import Any

import pytest
from access_parts import ROOT, brokers, headers
from asgi_call import http_scope
from bindery_broker.http.charging.allowance import PARENT_KEY, Limiter
from bindery_broker.http.charging.passed_on import KEY_SIZE, PassedOn, Sender
from bindery_broker.http.peers.senders import OF_BROKERS, Senders
from bindery_broker.settings import LimitSettings
from bindery_identity.principal import Method, Principal
from broker_harness import problem

NAMES = sorted(OF_BROKERS)
PROOF = PassedOn(bytes(KEY_SIZE)).header(Sender(is_part=False, client=None))
FORGED = (PROOF[0], b"0" * 64 + b" 0 -")


def senders(*, must_authenticate: bool = True, own_role: str | None = "broker") -> Senders:
    limiter = Limiter(LimitSettings().accounts(), by_address=True, now=lambda: 0.0)
    limiter.passed_on = PassedOn(bytes(KEY_SIZE))
    return Senders(limiter, own_role=lambda: own_role, must_authenticate=must_authenticate)


def request(role: str, *more: tuple[bytes, bytes], **state: Any) -> dict[str, Any]:
    sent = [(name, b"1") for name in NAMES if name != PROOF[0]]
    scope = http_scope(headers=[(b"x-other", b"1"), *sent, *more])
    return {**scope, "state": {"principal": Principal(role=role, method=Method.TOKEN), **state}}


@pytest.mark.parametrize("more", [(), (FORGED,), (PROOF, FORGED)])
@pytest.mark.parametrize("role", ["alice", "edge"])
def test_headers_of_brokers_are_removed_from_requests_of_clients_and_of_other_proxies(role, more) -> None:
    scope = request(role, *more)
    senders().check(scope)
    assert scope["headers"] == [(b"x-other", b"1")]
    assert "is_proxied" not in scope["state"]


@pytest.mark.parametrize(
    ("role", "more", "options"),
    [
        ("alice", (PROOF,), {}),
        ("alice", (PROOF,), {"own_role": None}),
        ("broker", (), {}),
        ("alice", (), {"must_authenticate": False}),
    ],
)
def test_headers_of_brokers_are_kept_if_a_broker_or_anybody_may_send_them(role, more, options) -> None:
    scope = request(role, *more)
    before = list(scope["headers"])
    senders(**options).check(scope)
    assert scope["headers"] == before
    assert scope["state"]["is_proxied"] is True


def test_requests_of_the_broker_to_itself_keep_them() -> None:
    scope = {**request("alice"), PARENT_KEY: None}
    before = list(scope["headers"])
    senders().check(scope)
    assert scope["headers"] == before


async def test_a_client_cannot_act_as_a_broker() -> None:
    async with brokers(2) as made:
        for at, broker in enumerate(made):  # each owns some of the topics
            sent = await broker.client.post(f"{ROOT}/t{at}/messages", content=b"x", headers=headers("producer"))
            assert sent.status_code == 200, sent.text
        claims = {"bindery-proxied": "1", "bindery-partition": "1"}
        for broker in made:
            for at in range(2):
                sent = await broker.client.post(
                    f"{ROOT}/t{at}/messages", content=b"x", headers={**headers("producer"), **claims}
                )
                assert sent.status_code == 200, "it is passed on, although the client says that it was already"
        whole = await made[0].client.put(f"{ROOT}/p/partitions", json={"partitions": 2}, headers=headers("admin"))
        assert whole.status_code == 201, whole.text
        await made[0].client.delete(f"{ROOT}/p-partition-1", headers=headers("admin"))
        refused = await made[0].client.put(f"{ROOT}/p-partition-1", headers={**headers("producer"), **claims})
        problem(refused, status=403, code="forbidden")
