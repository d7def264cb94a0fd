"""All calls of the admin API, from its route table: hostile names, bodies and sizes, and web pages of other sites.

Whatever is sent, the answer is Pulsar's form of an error or a success, never a server error.
"""

from bindery_broker.http.admin import ROUTERS
from bindery_broker.http.admin.calls import READING

CALLS = sorted(
    (method, route.path_format, route.operation_id)
    for router in ROUTERS
    for route in router.routes
    for method in route.methods
)
WRITES = [call for call in CALLS if call[0] != "GET"]
JSON = {"content-type": "application/json"}
KNOWN = {"tenant": "public", "namespace": "default", "topic": "t", "local": "t", "cluster": "bindery"}
NAMES = [
    "%00",
    "%0A",
    "%2F",
    "%2E%2E",
    "%FF",
    "%25",
    "a" * 5_000,
    "%F0%9F%98%80",
    "+",
    "'\";--",
    "-1",
    "9" * 400,
    "$%7Bx%7D",
]
BODIES = [
    b"", b"null", b"[]", b"{}", b'""', b"0", b"-1", b"1e999", b"9" * 400, b"true", b"[" * 50_000, b'{"a":' * 50_000,
    b"\xff\xfe", b'"\\ud800"', b'{"\\ud800": "\\ud800"}', b'{"partitions": -1}', b'{"ledgerId": -7, "entryId": 1e30}',
    b'{"type": "AVRO", "schema": "{", "properties": {"a": null}}', b'["produce", {}]',
]  # fmt: skip


def filled(path, name):
    """Return a path whose parameters are known ones, and `name` for the others."""
    parts = [part.strip("{}") if part.startswith("{") else None for part in path.split("/")]
    return "/".join(
        given if part is None else KNOWN.get(part, name) for part, given in zip(parts, path.split("/"), strict=True)
    )


def everywhere(path, name):
    return "/".join(name if part.startswith("{") else part for part in path.split("/"))


def check(answer, sent):
    assert answer.status_code < 500 or answer.status_code == 501, (sent, answer.status_code, answer.text[:300])
    if answer.status_code >= 400:
        assert set(answer.json()) == {"reason"}, (sent, answer.text[:300])
        assert len(answer.json()["reason"]) < 20_000


def test_the_table_of_routes_is_read():
    assert len(WRITES) > 200
    assert {method for method, *_ in CALLS} == {"GET", "POST", "PUT", "DELETE"}


def some(values, number, count=2):
    """Return `count` of the values, other ones for other numbers: all of them for each call would take minutes."""
    return [values[(number * count + index) % len(values)] for index in range(count)]


async def test_hostile_names_are_refused_or_found_missing(broker):
    await broker.broker.balancing.registration.register()
    for number, (method, path, _) in enumerate(CALLS):
        for name in some(NAMES, number, 1):
            for target in (filled(path, name), everywhere(path, name)):
                check(await broker.client.request(method, target, headers=JSON, content=b"{}"), (method, target))


async def test_hostile_bodies_are_refused(broker):
    await broker.client.put("/admin/v2/persistent/public/default/t", headers=JSON)
    for number, (method, path, _) in enumerate(call for call in WRITES if call[0] != "DELETE"):
        for body in some(BODIES, number, 3):
            target = filled(path, "x")
            check(await broker.client.request(method, target, headers=JSON, content=body), (method, target, body[:40]))


async def test_large_bodies_and_encoded_ones_are_refused(broker):
    large = b" " * (broker.settings.control_bytes_max + 1)
    seen = set()
    for method, path, name in WRITES:
        if method == "DELETE" or "Refuse" in name:
            continue
        answer = await broker.client.request(method, filled(path, "x"), headers=JSON, content=large)
        check(answer, (method, path))
        seen.add(answer.status_code)
        headers = {**JSON, "content-encoding": "gzip"}
        check(await broker.client.request(method, filled(path, "x"), headers=headers, content=b"x"), (method, path))
    assert 413 in seen


async def test_a_post_of_a_type_that_pages_can_send_is_refused(broker):
    for number, (method, path, name) in enumerate(WRITES):
        if method != "POST" or name in READING:
            continue
        for kind in some((None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"), number):
            headers = {} if kind is None else {"content-type": kind}
            answer = await broker.client.post(filled(path, "x"), headers=headers, content=b"{}")
            assert (answer.status_code, set(answer.json())) == (415, {"reason"}), path


async def test_requests_from_pages_of_other_sites_are_refused(broker):
    async with broker.serve():
        for number, (method, path, _) in enumerate(CALLS):
            for headers in some(({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}), number, 1):
                answer = await broker.client.request(
                    method, filled(path, "x"), headers={**JSON, **headers}, content=b"{}" if method != "GET" else b""
                )
                assert answer.status_code == 403, (method, path, headers, answer.text[:200])
        assert (await broker.client.get("/v1/topics")).json() == {"topics": []}
