"""Origin checks: requests of web pages of other sites are refused, those of programs and visitors are not."""

import json

import httpx
import pytest
from bindery_core.errors import BadRequest
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.origin import HostPolicy, OriginPolicy, origin_policy

LOCAL = OriginPolicy(HostPolicy(bound="127.0.0.1"), pages=("/",))


def refusal(
    policy: OriginPolicy, *headers: tuple[bytes, bytes], method: str = "GET", path: str = "/x", version: str = "1.1"
) -> str | None:
    """Return the code of a refusal; None if the request is allowed."""
    error = policy.refusal({"method": method, "path": path, "http_version": version, "headers": list(headers)})
    return None if error is None else error.code


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8080", "localhost.", "127.0.0.1", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "[::1]"],
)
def test_loopback_is_always_allowed(host: str) -> None:
    assert refusal(LOCAL, (b"host", host.encode())) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example",
        "0.0.0.0:8080", "10.0.0.1", "[fe80::1]:8080", "2130706433", "127.1", "0x7f.1", "sub.localhost",
        "xn--lcalhost-54a",
    ],
)  # fmt: skip
def test_a_loopback_port_serves_no_other_host(host: str) -> None:
    assert refusal(LOCAL, (b"host", host.encode())) == "host_not_allowed"


@pytest.mark.parametrize(
    "hosts",
    [
        [], [""], [" "], ["localhost", "localhost"], ["localhost", "evil.example"], ["user@localhost"],
        ["localhost:80x"], ["localhost/"], ["localhost, evil.example"],
        ["a b"], ["[::1"], ["::1"], ["localhost\x00"], ["%6cocalhost"],
        ["löcalhost"], ["x" * 300],
    ],
)  # fmt: skip
def test_anything_but_one_host_is_a_bad_request(hosts: list[str]) -> None:
    assert refusal(LOCAL, *((b"host", host.encode()) for host in hosts)) == "bad_request"


def test_only_old_http_may_leave_the_host_out() -> None:
    assert refusal(LOCAL, version="1.0") is None
    assert refusal(LOCAL, version="1.1") == "bad_request"
    assert refusal(LOCAL, (b"host", b"evil.example"), version="1.0") == "host_not_allowed"
    assert refusal(LOCAL, (b"origin", b"http://evil.example"), version="1.0") == "origin_not_allowed"


def test_a_port_that_others_reach_serves_addresses_its_own_names_and_configured_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7")
    policy = OriginPolicy(
        HostPolicy(bound="0.0.0.0", hosts="Broker, *.svc.cluster.local,2001:db8::1 ,", own_names=["b-0.brokers", ""])
    )
    allowed = ("10.1.2.3:8080", "[2001:db8::7]:8080", "node-7", "b-0.brokers:8080", "broker", "x.y.svc.cluster.local.")
    for host in allowed:
        assert refusal(policy, (b"host", host.encode())) is None, host
    for host in ("evil.example", "svc.cluster.local", "evilsvc.cluster.local", "broker.evil.example", "node-7.evil"):
        assert refusal(policy, (b"host", host.encode())) == "host_not_allowed", host


def test_a_port_on_one_address_is_reached_by_that_address() -> None:
    policy = OriginPolicy(HostPolicy(bound="10.1.2.3"))
    assert refusal(policy, (b"host", b"10.1.2.3:8080")) is None
    assert refusal(policy, (b"host", b"10.9.9.9:8080")) is None, "address translation may lie between"
    assert refusal(OriginPolicy(HostPolicy(bound="::1")), (b"host", b"[::ffff:127.0.0.1]:80")) is None


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8080", "localhost:8080"), ("HTTP://LOCALHOST:8080", "localhost:8080"),
        ("http://127.0.0.1:8080", "127.0.0.1:8080"), ("http://localhost", "localhost"),
        ("http://localhost:80", "localhost"), ("https://localhost", "localhost"), ("http://localhost", "localhost:80"),
        ("http://[::1]:8080", "[::1]:8080"), ("http://[::1]", "[::1]"),
    ],
)  # fmt: skip
def test_pages_of_the_port_itself_may_call_it(origin: str, host: str) -> None:
    headers = ((b"host", host.encode()), (b"origin", origin.encode()))
    assert refusal(LOCAL, *headers, method="POST") is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example", "null", "", "http://localhost", "http://localhost:3000", "https://localhost",
        "http://127.0.0.1:8080", "http://localhost:8080.evil.example", "http://localhost:8080@evil.example",
        "http://evil.example:8080", "http://localhost:8080/", "http://localhost:8080 http://evil.example",
        "chrome-extension://abc", "file://", "localhost:8080", "ftp://localhost:8080", "http://localhost:8080\\",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_pages_of_other_origins_may_not(origin: str, method: str) -> None:
    headers = ((b"host", b"localhost:8080"), (b"origin", origin.encode()))
    assert refusal(LOCAL, *headers, method=method) == "origin_not_allowed"


def test_a_repeated_origin_is_refused() -> None:
    own = (b"origin", b"http://localhost:8080")
    assert refusal(LOCAL, (b"host", b"localhost:8080"), own, own) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("cross-site", "origin_not_allowed"), ("Cross-Site", "origin_not_allowed"),
        (" cross-site ", "origin_not_allowed"),
        ("same-site", "origin_not_allowed"), ("Same-Site", "origin_not_allowed"), ("unknown", "origin_not_allowed"),
        ("same-origin", None), ("none", None), ("", None),
    ],
)  # fmt: skip
def test_fetch_metadata(site: str, expected: str | None) -> None:
    assert refusal(LOCAL, (b"host", b"localhost"), (b"sec-fetch-site", site.encode())) == expected


def test_one_of_several_values_suffices_to_refuse() -> None:
    sites = ((b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"cross-site"))
    assert refusal(LOCAL, (b"host", b"localhost"), *sites) == "origin_not_allowed"


@pytest.mark.parametrize("name", [b"sec-purpose", b"purpose"])
@pytest.mark.parametrize("purpose", [b"prefetch", b"prefetch;prerender", b"Prefetch", b"prefetch;anonymous-client-ip"])
@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ([b"none"], "origin_not_allowed"),
        ([], "origin_not_allowed"),
        ([b"cross-site"], "origin_not_allowed"),
        ([b"same-origin", b"none"], "origin_not_allowed"),
        ([b"same-origin"], None),
    ],
)
@pytest.mark.parametrize("path", ["/x", "/"])
def test_nothing_is_fetched_ahead_for_other_sites(
    name: bytes, purpose: bytes, sites: list[bytes], expected: str | None, path: str
) -> None:
    """Speculation rules of a hostile page look like an address that the visitor typed, but for the purpose."""
    navigation = ((b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document"))
    headers = ((b"host", b"localhost"), (name, purpose), *((b"sec-fetch-site", site) for site in sites))
    assert refusal(LOCAL, *headers, *navigation, path=path) == expected
    assert refusal(LOCAL, (b"host", b"localhost"), (name, b"other")) is None


@pytest.mark.parametrize(
    ("method", "path", "mode", "destination", "expected"),
    [
        ("GET", "/", "navigate", "document", None),
        ("HEAD", "/", "navigate", "document", None),
        ("POST", "/", "navigate", "document", "origin_not_allowed"),
        ("GET", "/v1/topics", "navigate", "document", "origin_not_allowed"),
        ("GET", "/", "navigate", "iframe", "origin_not_allowed"),
        ("GET", "/", "no-cors", "document", "origin_not_allowed"),
        ("GET", "/", "", "", "origin_not_allowed"),
    ],
)
@pytest.mark.parametrize("site", [b"cross-site", b"same-site"])
def test_other_sites_may_link_to_pages(
    method: str, path: str, mode: str, destination: str, expected: str | None, site: bytes
) -> None:
    headers = (
        (b"host", b"localhost"),
        (b"sec-fetch-site", site),
        (b"sec-fetch-mode", mode.encode()),
        (b"sec-fetch-dest", destination.encode()),
    )
    assert refusal(LOCAL, *headers, method=method, path=path) == expected


def test_configured_origins_may_call_even_across_sites() -> None:
    policy = OriginPolicy(HostPolicy(bound="127.0.0.1"), origins="https://Console.example.com, http://localhost:3000")
    for origin in (b"https://console.example.com", b"http://localhost:3000"):
        headers = ((b"host", b"localhost:8080"), (b"origin", origin), (b"sec-fetch-site", b"cross-site"))
        assert refusal(policy, *headers, method="POST") is None
    for origin in (b"http://console.example.com", b"https://console.example.com:444", b"https://example.com"):
        assert refusal(policy, (b"host", b"localhost:8080"), (b"origin", origin)) == "origin_not_allowed"
    headers = ((b"host", b"evil.example"), (b"origin", b"https://console.example.com"))
    assert refusal(policy, *headers) == "host_not_allowed"


def test_long_values_are_judged_and_not_remembered() -> None:
    policy = OriginPolicy(HostPolicy(bound="127.0.0.1"))
    for size in (10, 600, 20_000):
        assert refusal(policy, (b"host", b"localhost"), (b"origin", b"x" * size)) == "origin_not_allowed"
    assert policy._remembered.cache_info().currsize == 1


@pytest.mark.parametrize("hosts", ["a b", "http://x", "x:8080", "*", "a.*.b", "*.", "x/y", "*x.y"])
def test_wrong_hosts_are_reported(hosts: str) -> None:
    with pytest.raises(BadRequest, match=r"http\.hosts"):
        HostPolicy(bound="127.0.0.1", hosts=hosts)


@pytest.mark.parametrize("origins", ["*", "null", "example.com", "https://x/", "https://x/y", "ftp://x", "https://u@x"])
def test_wrong_origins_are_reported(origins: str) -> None:
    with pytest.raises(BadRequest, match=r"http\.origins"):
        OriginPolicy(HostPolicy(bound="127.0.0.1"), origins=origins)


def test_settings_become_a_policy() -> None:
    settings = HttpSettings(hosts="console.example.com", origins="https://other.example.com")
    policy = origin_policy(settings, bound="127.0.0.1", own_names=["own.example.com"], pages=("/docs",))
    assert refusal(policy, (b"host", b"console.example.com")) is None
    assert refusal(policy, (b"host", b"own.example.com"), (b"origin", b"https://other.example.com")) is None
    assert refusal(policy, (b"host", b"other.example.com")) == "host_not_allowed"


async def test_every_server_refuses_before_its_application_and_counts() -> None:
    seen = []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            seen.append(scope["path"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    stats = HttpStats()
    async with (
        HttpServer(app, stats=stats, pages=("/docs",)) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        answer = await http.post("/change", headers={"Origin": "http://evil.example"})
        assert (answer.status_code, answer.headers["content-type"]) == (403, "application/problem+json")
        assert answer.json()["code"] == "origin_not_allowed"
        assert answer.json()["facts"] == {"origin": "http://evil.example"}
        answer = await http.get("/rebound", headers={"Host": f"evil.example:{server.port}"})
        assert (answer.status_code, answer.json()["code"]) == (403, "host_not_allowed")
        assert "http.hosts" in answer.json()["detail"]
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert (await http.get("/change", headers=link)).status_code == 403
        assert (await http.get("/docs", headers=link)).status_code == 204
        assert (await http.post("/fine", headers={"Origin": server.url})).status_code == 204
        assert (await http.post("/curl", json={})).status_code == 204
    assert seen == ["/docs", "/fine", "/curl"]
    assert json.loads(json.dumps(stats.refused)) == {"origin_not_allowed": 2, "host_not_allowed": 1}
