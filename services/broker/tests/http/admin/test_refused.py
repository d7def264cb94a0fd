"""Calls that are not supported are refused in Pulsar's form, and name what is missing."""

import pytest
from bindery_broker.http.admin.refused import EMPTY, NOT_MADE, REFUSED

JSON = {"content-type": "application/json"}


def filled(path):
    for name in ("tenant", "namespace", "local", "name"):
        path = path.replace(f"{{{name}:form}}", "x")
    return path.replace("{cluster:form}", "bindery").replace("{rest:rest}", "a/b%2Fc")


@pytest.mark.parametrize(("methods", "path", "what"), REFUSED, ids=lambda value: str(value)[:60])
async def test_each_is_refused_with_a_reason(broker, methods, path, what):
    for method in methods:
        answer = await broker.client.request(method, filled(path), headers=JSON, content=b"{}")
        assert (answer.status_code, answer.json()) == (501, {"reason": f"Bindery does not support {what}"})


@pytest.mark.parametrize("path", NOT_MADE)
async def test_what_was_never_made_is_not_found(broker, path):
    answer = await broker.client.get(filled(path))
    assert answer.status_code == 404
    assert answer.json()["reason"].endswith("does not exist")


@pytest.mark.parametrize(("path", "value"), EMPTY.items())
async def test_lists_of_it_are_empty(broker, path, value):
    answer = await broker.client.get(filled(path))
    assert answer.status_code == 200
    assert (answer.json() if answer.content else None) == value


@pytest.mark.parametrize("path", ["/admin/v2/none", "/admin/v3/none", "/admin/v2/clusters/a/b/c"])
async def test_others_are_unknown(broker, path):
    answer = await broker.client.get(path)
    assert (answer.status_code, set(answer.json())) == (404, {"reason"})


async def test_a_web_page_gets_the_refusal_of_its_type(broker):
    answer = await broker.client.post("/admin/v3/functions/public/default/f", content=b"x")
    assert (answer.status_code, set(answer.json())) == (415, {"reason"})
