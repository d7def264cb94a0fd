"""The operations pages: /startupz, /readyz, /livez and /metrics."""

import asyncio

import httpx
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.problem import CONTENT_TYPE
from bindery_kit.observability.health import RENDERED_MAX, Health, OpsApp
from bindery_kit.observability.metrics import Metrics


async def test_metrics_are_served_with_fixed_buckets(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    assert "bindery_kittest_adds_total 3.0" in text
    assert 'bindery_kittest_add_seconds_bucket{le="0.0025"} 0.0' in text
    assert 'bindery_kittest_add_seconds_bucket{le="0.005"} 1.0' in text


async def test_readiness_lists_its_reasons_until_they_are_cleared(client: httpx.AsyncClient, health: Health) -> None:
    health.progress("replaying the journal", done=3, total=10, unit="MB")
    answer = await client.get("/startupz")
    assert answer.status_code == 503
    assert answer.json()["progress"] == {"step": "replaying the journal", "done": 3, "total": 10, "unit": "MB"}
    assert (await client.get("/livez")).status_code == 200

    health.started()
    health.block("metadata", "session lost")
    health.block("disk", "full")
    health.clear("disk")
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, {"metadata": "session lost"})
    text = (await client.get("/metrics")).text
    assert "\nbindery_ready 0\n" in text
    assert '\nbindery_not_ready{part="metadata"} 1\nbindery_not_ready{part="startup"} 0\n' in text

    health.clear("metadata")
    text = (await client.get("/metrics")).text
    assert "\nbindery_ready 1\n" in text
    assert '\nbindery_not_ready{part="metadata"} 0\n' in text
    assert (await client.get("/readyz")).json() == {"status": "ready"}

    health.fail("journal", "its thread died")
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/livez")).json()["reasons"] == {"journal": "its thread died"}


async def test_without_an_app_only_the_four_pages_are_served(health: Health) -> None:
    async with (
        HttpServer(OpsApp(health, Metrics("kittest")), port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get("/livez")).status_code == 200
        assert (await http.head("/livez")).content == b""
        answer = await http.get("/other")
        assert (answer.status_code, answer.headers["content-type"]) == (404, CONTENT_TYPE)


async def test_parts_add_their_metrics(health: Health) -> None:
    app = OpsApp(health, Metrics("kittest", with_process=False), parts=[lambda: b"one 1\n", lambda: b"two 2\n"])
    async with (
        HttpServer(app, port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get("/metrics")).text.endswith("\none 1\ntwo 2\n")


async def test_parts_can_be_prepared_in_several_turns_of_the_event_loop(health: Health) -> None:
    text = b""

    async def prepare() -> None:
        nonlocal text
        await asyncio.sleep(0)
        text += b"x"

    metrics = Metrics("kittest", with_process=False)
    app = OpsApp(health, metrics, parts=[lambda: b"prepared " + text], prepare=[prepare])
    async with (
        HttpServer(app, port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get("/metrics")).text.endswith("\nprepared x")
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/metrics")).text.endswith("\nprepared xx")


async def test_metrics_are_rendered_a_few_times_per_second(health: Health) -> None:
    rendered = 0

    def part() -> bytes:
        nonlocal rendered
        rendered += 1
        return b"rendered %d\n" % rendered

    app = OpsApp(health, Metrics("kittest", with_process=False), parts=[part])
    async with (
        HttpServer(app, port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        pages = [(await http.get("/metrics")).text for _ in range(RENDERED_MAX + 5)]
        assert pages[RENDERED_MAX - 1].endswith(f"\nrendered {RENDERED_MAX}\n")
        assert rendered <= RENDERED_MAX + 5
        before = asyncio.get_running_loop().time()
        for _ in range(100):
            await http.get("/metrics")
        took_s = asyncio.get_running_loop().time() - before
        assert rendered <= RENDERED_MAX * (took_s + 3)
