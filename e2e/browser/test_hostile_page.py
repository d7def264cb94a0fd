"""Hostile web pages in a real browser, against a cluster as `make run` starts it: nothing changes.

Pages come from a name of the attacker, from another port of this machine, from places without an origin, and from names
that are rebound to a service after the page was loaded. What they try: `bindery_e2e.browser.attempts`. The same pages
change and read another cluster, whose services record requests and serve what the origin check refuses: so the attempts
arrive, and it is the check that stops them. The browser's own protection of loopback is switched off.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_e2e.browser.attempts import KINDS, RESTRICTED, SECRET, SUBSCRIPTION, TOPIC
from bindery_e2e.browser.chromium import Chromium, Tab
from bindery_e2e.browser.cluster_state import bookie_url, changes, cluster_state, refused, wait_settled
from bindery_e2e.browser.hostile_site import NAME, HostileSite
from bindery_e2e.browser.unguarded import Recorded, environment, recorded
from bindery_e2e.browser.visit import Noticed, visit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
MESSAGES: Final = 3
REBOUND: Final = tuple(kind for kind in KINDS if kind.startswith("rebound "))
GROUPS: Final = {
    "by name": ("name",),
    "other ports of this machine": ("port", "localhost"),
    "without origin": RESTRICTED,
    "rebound": REBOUND,
}
"""Kinds of pages that are open at the same time."""
NEVER_SENT: Final = {
    "fetch no-cors PUT": "other methods than GET, HEAD and POST need the mode cors",
    "fetch no-cors DELETE": "the same",
    "fetch same-origin": "the mode forbids it",
    "track": "subtitles of other origins need the mode cors of their video",
}
"""Attempts that do not reach the check, and why."""
POSTED: Final = {"fetch cors", "fetch no-cors", "beacon", "form", "form window", "worker", "redirect", "form redirect"}
"""Means by which a page of another site stores a message of its choice, if it is not refused."""
READABLE: Final = ("loaded", "basic ", "cors ", "xhr 2")
"""Outcomes of attempts whose response the page can use."""


def means(one: Noticed) -> str:
    attempt = one.attempt
    if attempt.how != "fetch":
        return attempt.how
    words = f"fetch {attempt.mode}"
    return words if f"{words} {attempt.method}" not in NEVER_SENT else f"{words} {attempt.method}"


def running(options: dict[str, str]) -> Iterator[ThrowawayCluster]:
    """A cluster with a topic of confidential messages, and a subscription that has received none of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name, value)
        cluster = ThrowawayCluster()
        with cluster:
            with httpx.Client(base_url=cluster.url, timeout=30, trust_env=False) as http:
                for number in range(MESSAGES):
                    http.post(f"{TOPIC}/messages", content=f"{SECRET}-{number}".encode()).raise_for_status()
                http.put(SUBSCRIPTION, json={"initial": "earliest"}).raise_for_status()
            yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    """As `make run` starts it."""
    yield from running({})


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def unguarded(cluster: ThrowawayCluster, record: Path) -> Iterator[ThrowawayCluster]:
    """Without the check. (The guarded cluster is started before, because it needs some seconds to settle.)"""
    yield from running(environment(record))


def requests_of(record: Path, noticed: Sequence[Noticed]) -> dict[str, Recorded]:
    known = {one.attempt.id for one in noticed}
    return {request.attempt: request for request in recorded(record) if request.attempt in known}


# --- without the check ------------------------------------------------------------------------------------------------


def test_without_the_check_a_page_of_another_site_changes_the_cluster(
    unguarded: ThrowawayCluster, record: Path, tmp_path: Path
) -> None:
    before = asyncio.run(cluster_state(unguarded))
    noticed = visit(unguarded, ["name"], tmp_path, is_marked=True)
    changed = changes(before, asyncio.run(cluster_state(unguarded)))
    assert changed["auditor is_enabled"] == (True, False)
    assert changed["znode /bindery/recovery/pause"][0] is None
    assert "znode /ledgers/idgen" in changed, "self-tests of the bookie wrote ledgers"
    assert f"broker {TOPIC.removeprefix('/v1/topics/')}/subscriptions" in changed, "a consumer leased messages"
    stored = httpx.get(
        f"{unguarded.url}{TOPIC}/messages", params={"start": "earliest", "max": 1000}, timeout=30, trust_env=False
    ).text
    assert {means(one) for one in noticed if f"by attempt {one.attempt.id}" in stored} >= POSTED

    arrived = requests_of(record, noticed)
    silent = {means(one) for one in noticed} - {means(one) for one in noticed if one.attempt.id in arrived}
    assert silent == set(NEVER_SENT), "each means sends requests, unless the browser or the server forbids it"
    served = {request.path for request in arrived.values() if request.verdict is None}
    assert served == {"/", "/docs"}, "the check refuses all but links to pages"
    for one in noticed:
        if one.attempt.id in arrived and arrived[one.attempt.id].verdict is None:
            assert one.attempt.how == "window"


def test_without_the_check_a_rebound_page_reads_and_changes_everything(
    unguarded: ThrowawayCluster, record: Path, tmp_path: Path
) -> None:
    before = asyncio.run(cluster_state(unguarded))
    noticed = visit(unguarded, REBOUND, tmp_path, is_marked=True)
    assert any(SECRET in one.text for one in noticed)
    changed = changes(before, asyncio.run(cluster_state(unguarded)))
    assert "public/default/created" in changed["broker topics"][1]["topics"]
    for service in ("broker", "bookie"):
        deleting = [one for one in noticed if (one.attempt.service, one.attempt.method) == (service, "DELETE")]
        outcomes = [one.outcome for one in deleting]  # of three equal attempts only the first one finds something
        assert any(outcome.startswith(("basic 20", "xhr 20")) for outcome in outcomes), (service, outcomes)
    readonly = changed.get("bookie-0 /api/v1/bookie/state/readonly")
    asked = [one for one in noticed if "/state/readonly" in one.attempt.url]
    assert readonly is not None, [(one.attempt.method, one.attempt.how, one.outcome, one.text[:300]) for one in asked]
    assert readonly[1]["readOnly"] is True
    assert changed["bookie-0 /api/v1/bookie/gc/suspend_compaction"]
    assert changed["auditor lost_bookie_delay_s"][1] == 86_400
    assert changed["auditor bookies"]
    arrived = requests_of(record, noticed).values()
    assert {request.verdict for request in arrived} == {"host_not_allowed"}
    assert not any("sec-fetch-site" in request.headers for request in arrived), "sent to loopback and HTTPS only"


def frame(tab: Tab, url: str) -> bool:
    """Show `url` in a frame of the page. Return whether the browser displays it."""
    tab.evaluate(
        f"new Promise((done) => {{const frame = document.createElement('iframe'); frame.src = '{url}'; "
        "frame.onload = () => done(true); document.body.append(frame)})"
    )
    tree: dict[str, Any] = tab.command("Page.getFrameTree")["frameTree"]
    return "unreachableUrl" not in tree["childFrames"][-1]["frame"]


def test_without_the_check_the_headers_of_pages_prevent_frames(unguarded: ThrowawayCluster) -> None:
    with HostileSite() as site, Chromium() as browser:
        site.attempts = {"empty": []}
        tab = browser.open()
        tab.navigate(f"{site.url}/page?kind=empty")
        assert frame(tab, f"{unguarded.auditor_url()}/v1/bookies"), "other responses are displayed"
        assert not frame(tab, f"{unguarded.auditor_url()}/")
        assert not frame(tab, f"{unguarded.url}/docs")
        assert any("frame-ancestors" in text or "X-Frame-Options" in text for text in tab.console), tab.console


# --- with the check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
def test_a_hostile_page_changes_and_reads_nothing(cluster: ThrowawayCluster, group: str, tmp_path: Path) -> None:
    wait_settled(cluster)
    before, refused_before = asyncio.run(cluster_state(cluster)), refused(cluster)
    noticed = visit(cluster, GROUPS[group], tmp_path)
    assert changes(before, asyncio.run(cluster_state(cluster))) == {}
    for one in noticed:
        assert SECRET not in one.text, one.attempt.title
        if group == "rebound":
            assert not one.text or '"code": "host_not_allowed"' in one.text, (one.attempt.title, one.text)
        else:
            assert not one.text, (one.attempt.title, one.text)
            assert not one.outcome.startswith(("basic ", "cors ", "xhr 2")), (one.attempt.title, one.outcome)
        if one.attempt.how in ("img", "script", "module", "stylesheet", "audio", "video", "eventsource", "websocket"):
            assert one.outcome != "loaded", one.attempt.title
    after = refused(cluster)
    grown = {reason: after[reason] - refused_before.get(reason, 0) for reason in after}
    reason = "host_not_allowed" if group == "rebound" else "origin_not_allowed"
    assert grown[reason] > len(noticed) / 2, "requests arrive, and are counted"


def opened(browser: Chromium, url: str) -> Tab:
    tab = browser.open()
    tab.navigate(url)
    return tab


def test_the_auditors_own_page_works(cluster: ThrowawayCluster) -> None:
    with HostileSite() as site, Chromium(proxy=site.proxy) as browser:
        tab = opened(browser, f"{cluster.auditor_url()}/")
        text = tab.evaluate("document.body.innerText")
        assert "No ledger is known to be under-replicated." in text
        for number in range(cluster.bookies):
            assert f"bookie-{number}" in text
        assert tab.evaluate("getComputedStyle(document.querySelector('table')).borderCollapse") == "collapse"
        assert not tab.console
        assert {url.split("/")[2] for url in tab.requests} == {cluster.auditor_url().split("/")[2]}
        tab.command("Page.reload")
        tab.wait(lambda: tab.loads == 2, "the page is loaded again")
        assert "bookie-0" in tab.evaluate("document.body.innerText")
        tab.evaluate("document.body.innerHTML += '<img src=x onerror=\"window.ran = true\">'")
        tab.wait(lambda: any("Content Security Policy" in line for line in tab.console), "the policy forbids it")
        assert tab.evaluate("window.ran") is None

        site.attempts = {"empty": []}
        tab = opened(browser, f"http://{NAME}:{site.port}/page?kind=empty")
        tab.evaluate(f"void (location.href = '{cluster.auditor_url()}/')")
        tab.wait(lambda: tab.loads == 2, "a link of another site is followed")
        assert "bookie-0" in tab.evaluate("document.body.innerText")


def test_the_brokers_page_works_without_a_network(cluster: ThrowawayCluster) -> None:
    with Chromium() as browser:
        tab = opened(browser, f"{cluster.url}/docs")
        assert "/v1/topics" in tab.evaluate("document.body.innerText")
        assert tab.evaluate("getComputedStyle(document.querySelector('table')).borderCollapse") == "collapse"
        assert not tab.console
        tab.evaluate("document.querySelector('a[href=\"openapi.json\"]').click()")
        tab.wait(lambda: tab.loads == 2, "the link is followed")
        assert '"openapi"' in tab.evaluate("document.body.innerText")
        assert {url.split("/")[2] for url in tab.requests} == {cluster.url.split("/")[2]}


def test_a_page_of_the_service_itself_may_change_it(cluster: ThrowawayCluster) -> None:
    options = "{{method: '{}', body: '{}', headers: {{'Content-Type': 'application/json'}}}}"
    post = f"fetch('{{}}', {options}).then((r) => r.status)"
    with Chromium() as browser:
        tab = opened(browser, f"{cluster.auditor_url()}/v1/recovery/status")
        assert tab.evaluate(post.format("/v1/recovery/pause", "POST", '{"reason": "a test"}')) == 200
        assert tab.evaluate("fetch('/v1/recovery/status').then((r) => r.json()).then((s) => s.is_enabled)") is False
        assert tab.evaluate(post.format("/v1/recovery/resume", "POST", "")) == 200
        tab = opened(browser, f"{bookie_url(cluster)}/api/v1/bookie/state")
        assert tab.evaluate(post.format("/api/v1/bookie/gc", "PUT", "{}")) == 200
