"""Attempts of hostile pages: every changing route of every service, by every means of a page.

| means                                                                 | against                                    |
|-----------------------------------------------------------------------|--------------------------------------------|
| fetch and XMLHttpRequest with the route's method, as JSON             | every changing route                       |
| fetch in the modes `cors`, `no-cors` and `same-origin`                | the same                                   |
| the types that need no permission (text, form, multipart, none),      | every route with POST                      |
| beacon, forms into frames, redirects that keep method and body        |                                            |
| fetch in the modes `cors` and `no-cors`                               | every route with GET, probes and pages     |
| every element and API that loads an address (`LOADING`)               | the GET routes that do something, a route  |
|                                                                       | with POST, the pages (as hidden frames)    |
| pings, reports of a content security policy, forms into windows       | a route with POST of broker and auditor    |
| other spellings of loopback, and names that lead there (`SPELLINGS`)  | one route with POST of broker and auditor, |
|                                                                       | a list                                     |
| fetch, forms, images and WebSockets                                   | the bookie's port 3181, ZooKeeper          |

A page of a rebound name tries all that concerns the service whose port it has, from the service's own origin.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from bindery_e2e.attacks.http_routes import http_routes
from bindery_e2e.browser.hostile_site import CLUSTER_NAME, REBOUND

SECRET: Final = "a-confidential-message"
TOPIC: Final = "/v1/topics/public/default/victim"
SUBSCRIPTION: Final = f"{TOPIC}/subscriptions/readers"
FILLED: Final = {
    "{tenant}": "public", "{namespace}": "default", "{topic}": "victim", "{subscription}": "readers",
    "{consumer}": "honest", "{message_id}": "0:0:-1:-1", "{id}": "0", "{local}": "victim", "{producer}": "honest",
    "{version}": "0", "{policy}": "message_ttl_s", "{role}": "clerk", "{broker}": "local",
}  # fmt: skip
"""Values of the names in paths."""
AUTORECOVERY: Final = "/api/v1/autorecovery"
OF_CLUSTER: Final[Mapping[tuple[str, str], object]] = {
    ("PUT", f"{AUTORECOVERY}/status"): "?enabled=false",
    ("PUT", f"{AUTORECOVERY}/lost_bookie_recovery_delay"): {"delay_seconds": 86_400},
    ("PUT", f"{AUTORECOVERY}/decommission"): {"bookie_src": "bookie-2", "delete_cookie": True},
    ("PUT", f"{AUTORECOVERY}/bookie"): {"bookie_src": ["bookie-3"], "delete_cookie": True},
}
IN_TOPICS: Final = "/v1/topics/{tenant}/{namespace}/{topic}"
EFFECTIVE: Final[Mapping[str, Mapping[tuple[str, str], object]]] = {
    "broker": {
        ("POST", f"{IN_TOPICS}/messages"): "by attempt {id}",
        ("POST", f"{IN_TOPICS}/subscriptions/{{subscription}}/ack"): {"message_ids": ["0:0:-1:-1"]},
        ("POST", f"{IN_TOPICS}/subscriptions/{{subscription}}/nack"): {"message_ids": ["0:0:-1:-1"]},
        ("POST", f"{IN_TOPICS}/subscriptions/{{subscription}}/retry"): {"message_ids": ["0:0:-1:-1"]},
        ("POST", f"{IN_TOPICS}/subscriptions/{{subscription}}/receive"): {"consumer": "evil", "wait_ms": 0},
        ("POST", f"{IN_TOPICS}/subscriptions/{{subscription}}/reset"): {"initial": "latest"},
        ("POST", f"{IN_TOPICS}/subscriptions/{{subscription}}/seek"): {"timestamp": 2**41},
        ("GET", f"{IN_TOPICS}/subscriptions/{{subscription}}/stream"): "?consumer=evil",
    },
    "bookie": {
        **OF_CLUSTER,
        ("PUT", "/api/v1/bookie/state/readonly"): {"readOnly": True},
        ("PUT", "/api/v1/bookie/gc/suspend_compaction"): {"suspendMajor": True, "suspendMinor": True},
        ("PUT", "/api/v1/bookie/gc/rollback"): {"accept": True, "version": 0},
        ("PUT", "/api/v1/bookie/drill"): {"rules": ["datasync *.txn delay 5"]},
        ("DELETE", "/api/v1/ledger/delete"): "?ledger_id=0",
        ("GET", "/api/v1/ledger/read"): "?ledger_id=0",
        ("GET", "/api/v1/ledger/metadata"): "?ledger_id=0",
    },
    "auditor": OF_CLUSTER,
}
"""What makes a route do something: a query, the text of a body, or a JSON object. Other routes get an empty object."""
MADE: Final = ("PUT /v1/topics/", "DELETE ")
"""Changes that are tried after all others, because they create or delete what others use."""
UNDONE: Final = ("resume", "drill")
"""Changes that are tried before all others, because they undo them or make a bookie slow."""
PAGES: Final = {"broker": ("/docs", "/openapi.json"), "bookie": (), "auditor": ()}
PROBES: Final = ("/metrics", "/readyz")
SIMPLE: Final = ("text/plain", "form", "multipart", None)
"""Types of a body that a page may send anywhere unasked. `form` and `multipart`: the browser encodes it."""
LOADING: Final = (
    "img", "script", "module", "stylesheet", "prefetch", "preload", "modulepreload", "icon", "audio", "video", "track",
    "object", "embed", "iframe", "refresh", "css", "speculation", "eventsource", "websocket", "worker", "window",
    "form",
)  # fmt: skip
"""Means to load an address: methods of the script."""
OF_OTHER_ORIGINS: Final = ("redirect", "form redirect", "csp", "refresh")
"""Means that need a page of the site as an intermediate."""
SPELLINGS: Final = ("localhost", "127.1", "127.0.0.2", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", CLUSTER_NAME)
"""Further hosts that lead to loopback. Services listen on 127.0.0.1 only, so 127.0.0.2 and ::1 reach nothing."""
WITHOUT_HTTP: Final = ("ledgers", "zookeeper")
"""Ports that do not serve HTTP: that of BookKeeper's protocol, and of ZooKeeper."""
COMMANDS: Final = "\r\nruok\r\nkill\r\n\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00"
"""Body for these ports: commands of ZooKeeper in four letters, and a frame."""
RESTRICTED: Final = ("sandbox", "data", "file")
"""Kinds of pages without an origin."""
KINDS: Final = ("name", "port", "localhost", *RESTRICTED, *(f"rebound {name}" for name in REBOUND.values()))
"""Kinds of pages, by where they come from: a name; another port of 127.0.0.1, or of localhost; a sandbox; a `data:`
URL; a file; names that lead to a service after the page was loaded."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. `how`: a function of the script. `type`: of the body. `mode`: of `fetch`."""

    id: str
    how: str
    service: str
    method: str
    url: str
    body: str = ""
    type: str | None = None
    mode: str = "cors"
    keepalive: bool = False
    referrerPolicy: str = ""

    @property
    def title(self) -> str:
        words = (self.how, self.mode if self.how == "fetch" else "", self.method, self.type or "no type", self.url)
        return " ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has an effect, or reads something, if it is not refused."""

    service: str
    method: str
    path: str
    body: str = ""

    @property
    def is_post(self) -> bool:
        return self.method == "POST"


def calls() -> list[Call]:
    """Return every route of every service, with what makes it do something."""
    found = []
    for service, routes in http_routes().items():
        more = [("GET", path) for path in (*PAGES[service], *PROBES)]
        for method, path in (*routes, *more):
            effect = EFFECTIVE[service].get((method, path), {})
            for name, value in FILLED.items():
                path = path.replace(name, value)
            if isinstance(effect, dict):
                found.append(Call(service, method, path, "" if method == "GET" else json.dumps(effect)))
            elif str(effect).startswith("?"):
                found.append(Call(service, method, path + str(effect)))
            else:
                found.append(Call(service, method, path, str(effect)))
    found += [
        Call("broker", "PUT", "/v1/topics/public/default/created", "{}"),
        Call("broker", "PUT", f"{TOPIC}/subscriptions/created", "{}"),
        Call("broker", "GET", f"{TOPIC}/messages?start=earliest"),
    ]
    return sorted(found, key=_rank)


def attempts(kind: str, ports: Mapping[str, int], *, is_marked: bool = False) -> list[Attempt]:
    """Return the attempts of a page. `ports`: HTTP ports by service. `is_marked`: whether the query of each URL ends
    with `attack=<id>`, which services started by `unguarded` remove before they check parameters."""
    name = kind.removeprefix("rebound ")
    service = next((service for service, own in REBOUND.items() if own == name), None)
    if service is None:
        bases = {service: f"http://127.0.0.1:{port}" for service, port in ports.items()}
    else:
        bases = {service: f"http://{name}:{ports[service]}"}
    found = list(_all(bases, ports, is_rebound=service is not None))
    prefix = "".join(letter for letter in kind if letter.isalnum())
    return [_numbered(one, f"{prefix}-{number}", is_marked=is_marked) for number, one in enumerate(found)]


def as_json(found: Sequence[Attempt]) -> list[dict[str, object]]:
    return [asdict(one) for one in found]


def _rank(call: Call) -> int:
    text = f"{call.method} {call.path}"
    if call.method == "GET":
        return 0
    if any(word in text for word in UNDONE):
        return 1
    return 3 if text.startswith(MADE) else 2


def _all(bases: Mapping[str, str], ports: Mapping[str, int], *, is_rebound: bool) -> Iterator[Attempt]:
    known = [call for call in calls() if call.service in bases]

    def of(call: Call, how: str, **changes: object) -> Attempt:
        one = Attempt("", how, call.service, call.method, bases[call.service] + call.path, call.body)
        return replace(one, **changes)  # type: ignore[arg-type]

    for call in known:
        if call.method == "GET":
            yield of(call, "fetch", mode="cors")
            yield of(call, "fetch", mode="no-cors")
    effects = [call for call in known if call.path.endswith(("consumer=evil", "/sanity"))]
    targets = [call for call in known if call.path in (f"{TOPIC}/messages", "/v1/recovery/pause") and call.is_post]
    framed = [call for call in known if call.path in ("/", "/docs")]
    for how in LOADING:
        if is_rebound and how in OF_OTHER_ORIGINS:
            continue
        for call in (*effects, *targets, *framed):
            yield of(call, how, method="GET")
    for call in known:
        if call.method == "GET":
            continue
        yield of(call, "fetch", mode="cors", type="application/json")
        yield of(call, "fetch", mode="same-origin", type="application/json")
        yield of(call, "xhr", type="application/json")
        yield of(call, "fetch", mode="no-cors", type="text/plain")
        if call.is_post:
            yield from (of(call, "fetch", mode="no-cors", type=type_) for type_ in SIMPLE[1:])
            yield of(call, "fetch", mode="cors", type="text/plain")
            yield of(call, "fetch", mode="no-cors", type="text/plain", keepalive=True)
            yield of(call, "fetch", mode="no-cors", type="text/plain", referrerPolicy="no-referrer")
            yield of(call, "beacon", type="text/plain")
            for enctype in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                yield of(call, "form", type=enctype)
            if not is_rebound:
                yield of(call, "redirect", mode="no-cors", type="text/plain")
    for call in targets:
        yield of(call, "fetch", mode="no-cors", body="")
        yield of(call, "form window", type="text/plain")
        yield of(call, "worker")
        yield of(call, "ping")
        if not is_rebound:
            yield of(call, "form redirect", type="text/plain")
            yield of(call, "csp")
    if is_rebound:
        return
    for host in SPELLINGS:
        for call in targets:
            url = f"http://{host}:{ports[call.service]}{call.path}"
            yield of(call, "fetch", mode="no-cors", type="text/plain", url=url)
            yield of(call, "form", type="text/plain", url=url)
        yield Attempt("", "fetch", "broker", "GET", f"http://{host}:{ports['broker']}/v1/topics")
    for service in WITHOUT_HTTP:
        if service in ports:
            url = f"http://127.0.0.1:{ports[service]}/"
            yield Attempt("", "fetch", service, "POST", url, COMMANDS, "text/plain", "no-cors")
            yield Attempt("", "form", service, "POST", url, COMMANDS, "text/plain")
            yield from (Attempt("", how, service, "GET", url) for how in ("fetch", "img", "websocket"))


def _numbered(one: Attempt, number: str, *, is_marked: bool) -> Attempt:
    mark = f"{'&' if '?' in one.url else '?'}attack={number}" if is_marked else ""
    return replace(one, id=number, url=one.url + mark, body=one.body.replace("{id}", number))
