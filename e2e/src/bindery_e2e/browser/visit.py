"""Open hostile pages in a browser, and return what they noticed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from bindery.standalone.plan import (
    AUDITOR_HTTP_PORT,
    BOOKIE_HTTP_PORT,
    BOOKIE_PORT,
    BROKER_HTTP_PORT,
    ZOOKEEPER_PORT,
)
from bindery.standalone.throwaway import ThrowawayCluster

from bindery_e2e.browser.attempts import Attempt, as_json, attempts
from bindery_e2e.browser.chromium import Chromium
from bindery_e2e.browser.hostile_site import NAME, REBOUND, HostileSite

PAGE_TIMEOUT_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Noticed:
    """What a page noticed of one attempt. `text`: what it could read of the response."""

    attempt: Attempt
    outcome: str
    text: str


def ports_of(cluster: ThrowawayCluster) -> dict[str, int]:
    """Return the HTTP ports of a cluster's broker, first bookie and auditor, and the ports without HTTP."""
    http = {"broker": BROKER_HTTP_PORT, "bookie": BOOKIE_HTTP_PORT, "auditor": AUDITOR_HTTP_PORT}
    ports = {**http, "ledgers": BOOKIE_PORT, "zookeeper": ZOOKEEPER_PORT}
    return {service: port + cluster.port_offset for service, port in ports.items()}


def visit(
    cluster: ThrowawayCluster, kinds: Sequence[str], directory: Path, *, is_marked: bool = False
) -> list[Noticed]:
    """Open pages of all `kinds` at the same time in one browser, and wait until they have tried everything.

    `directory`: for pages that are files. `is_marked`: whether URLs contain the ids of their attempts.
    """
    ports = ports_of(cluster)
    tried = {kind: attempts(kind, ports, is_marked=is_marked) for kind in kinds}
    with HostileSite() as site, Chromium(proxy=site.proxy) as browser:
        site.attempts = {kind: as_json(found) for kind, found in tried.items()}
        for kind in kinds:
            browser.open(_url(site, kind, ports, directory))
        until = time.monotonic() + PAGE_TIMEOUT_S
        while len(site.results) < len(kinds):
            assert time.monotonic() < until, f"not finished: {set(kinds) - set(site.results)}; {browser.log()[-1000:]}"
            time.sleep(0.05)
        return [one for kind in kinds for one in _noticed(tried[kind], site.results[kind])]


def _url(site: HostileSite, kind: str, ports: Mapping[str, int], directory: Path) -> str:
    if kind == "data":
        return f"data:text/html,{site.document(kind)}"
    if kind == "file":
        path = directory / "hostile.html"
        path.write_text(site.document(kind))
        return path.as_uri()
    if kind.startswith("rebound "):
        name = kind.removeprefix("rebound ")
        port = next(ports[service] for service, own in REBOUND.items() if own == name)
        return f"http://{name}:{port}/page?kind={quote(kind)}"
    host = {"port": "127.0.0.1", "localhost": "localhost"}.get(kind, NAME)
    return f"http://{host}:{site.port}/{'sandbox' if kind == 'sandbox' else 'page'}?kind={kind}"


def _noticed(tried: Sequence[Attempt], results: Sequence[Mapping[str, Any]]) -> list[Noticed]:
    known = {one.id: one for one in tried}
    found = [Noticed(known[result["id"]], result["outcome"], result["text"]) for result in results]
    assert len(found) == len(known), "a page did not try everything"
    return found
