"""The OpenAPI document: valid, complete, and in agreement with the answers of the broker."""

import re

from broker_harness import ROUTES


async def test_every_route_is_described(broker):
    document = (await broker.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, found in document["paths"].items() for method in found}
    assert described == {(method, route.path_format) for route in ROUTES for method in route.methods}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            names = {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "path"}
            assert names == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert "400" in operation["responses"]


async def test_operations_keep_their_ids_and_document_their_errors(broker):
    document = (await broker.client.get("/openapi.json")).json()
    operations = {found["operationId"]: found for path in document["paths"].values() for found in path.values()}
    assert sorted(operations) == [
        "ack", "beginMove", "cancelMessage", "clearBacklog", "compact", "compactionStatus", "compareSchema",
        "createNamespace", "createTopic", "deleteNamespace", "deleteNamespacePolicy", "deletePartitions",
        "deleteSchema", "deleteTenant", "deleteTopic", "deleteTopicPolicy", "drainBroker", "drainStatus", "expire",
        "explainPermission", "explainSubscription", "findUnknown", "getNamespace", "getNamespacePolicies",
        "getProducer", "getSchema", "getSchemaVersion", "getTenant", "getTopicPolicies", "grantNamespacePermission",
        "grantTopicPermission", "handBack", "leave", "listBrokerBundles", "listBrokers", "listBundles",
        "listDeadLetters", "listNamespacePermissions", "listNamespaces", "listNamespacesOfTenant", "listSchemaVersions",
        "listSubscriptions", "listTenants", "listTopicPermissions", "listTopics", "nack", "produce", "purgeDeadLetters",
        "putNamespacePolicies", "putTenant", "putTopicPolicies", "readMessage", "readMessages", "receive",
        "redriveDeadLetters", "releaseTopic", "resetSubscription", "retry", "revokeNamespacePermission",
        "revokeTopicPermission", "seek", "setPartitions", "showLimits", "skip", "splitBundle", "stillHolds",
        "storeCopies", "stream", "subscribe", "takeBundle", "takeTopic", "topicInternalStats", "topicPartitions",
        "topicRetention", "topicStats", "undrainBroker", "unloadNamespace", "unloadTopic", "unsubscribe",
        "uploadSchema",
    ]  # fmt: skip
    for operation in operations.values():
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"]
    assert set(operations["produce"]["responses"]) == {
        "200", "207", "307", "400", "401", "403", "404", "408", "409", "413", "415", "422", "429", "431", "500", "503",
        "504", "507",
    }  # fmt: skip
    assert "422" not in operations["topicStats"]["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


async def test_every_reference_is_defined(broker):
    text = (await broker.client.get("/openapi.json")).text
    schemas = (await broker.client.get("/openapi.json")).json()["components"]["schemas"]
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert referred <= set(schemas)
    assert {"ReceiveBody", "MessageOut", "TopicStats", "SeekBody", "Problem"} <= referred


async def test_fields_have_descriptions(broker):
    document = (await broker.client.get("/openapi.json")).json()
    receive = document["components"]["schemas"]["ReceiveBody"]["properties"]
    assert "repeated call" in receive["request_id"]["description"]
    assert (receive["max"]["minimum"], receive["max"]["maximum"], receive["max"]["default"]) == (1, 1000, 100)


async def test_the_page_loads_nothing_from_other_hosts(broker):
    answer = await broker.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "http://" not in answer.text.replace("http://one", "")
    assert "https://" not in answer.text
    for route in ROUTES:
        assert route.path_format in answer.text
