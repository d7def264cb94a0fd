"""The OpenAPI document: valid, complete, and true of what the broker answers."""

from bindery_broker.http.routes import ROUTES


async def test_every_route_is_described(broker):
    document = (await broker.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, found in document["paths"].items() for method in found}
    assert described == {(route.method, route.template) for route in ROUTES}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            names = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
            assert names == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert "400" in operation["responses"]


async def test_fields_carry_their_explanations(broker):
    document = (await broker.client.get("/openapi.json")).json()
    receive = document["components"]["schemas"]["ReceiveBody"]["properties"]
    assert "repeated call" in receive["request_id"]["description"]
    assert (receive["max"]["minimum"], receive["max"]["maximum"], receive["max"]["default"]) == (1, 1000, 100)


async def test_the_page_needs_nothing_from_elsewhere(broker):
    answer = await broker.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "http://" not in answer.text.replace("http://one", "")
    assert "https://" not in answer.text
    for route in ROUTES:
        assert route.template in answer.text
