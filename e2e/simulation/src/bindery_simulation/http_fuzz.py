"""Plan malicious clients of an HTTP port by seed: the bytes of each connection, its pauses, and how it ends.

A plan depends only on (seed, number, routes), so that one connection can be repeated alone. About half of the plans are
valid requests to the routes of the service, or damaged ones; the others are attacks of one of `KINDS`. The bodies of
valid requests are those of their route (`BODIES`), some with a hostile value, so that they reach the application.

If a plan has a `refusal`, its first response must be that refusal. Thus a check that has disappeared is found.

The plans do not prevent a service from serving others in a legitimate way: they name only topics, ledgers and bookies
of their own, or missing ones. Whoever runs them undoes the effects of `UNDONE` routes.
"""

import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from random import Random
from typing import Final

TOKEN: Final = "token-of-the-fuzzed-service"
"""Most requests to operators' ports are authorized with it."""
TOPICS: Final = 8
"""Number of topics that valid requests name."""
LEDGER_ID_MIN: Final = 900_000_000
"""Lowest ledger id in requests: no ledger of the cluster has such an id."""
UNDONE: Final = frozenset({
    ("PUT", "/api/v1/bookie/state/readonly"),
    ("PUT", "/api/v1/bookie/gc/suspend_compaction"),
    ("PUT", "/api/v1/autorecovery/status"),
    ("POST", "/v1/recovery/pause"),
})  # fmt: skip
"""Routes by which an authorized client disables a part of a service, as it is documented."""
UNDAMAGED: Final = frozenset({("DELETE", "/api/v1/ledger/delete")})
"""Routes whose requests are not damaged, because another id in them would name a ledger that is in use."""
PROBES: Final = ("/livez", "/readyz", "/startupz", "/metrics", "/heartbeat", "/docs", "/openapi.json", "/")

Route = tuple[str, str]
"""Method and path; `{name}` in a path stands for one segment."""


class Refusal(StrEnum):
    """Why a service must refuse a request."""

    HEAD = "oversized head"
    LATE_HEAD = "late head"
    BODY = "over-long body"
    CODING = "unsupported coding"
    TYPE = "wrong content type"
    TOKEN = "missing or wrong token"
    ORIGIN = "page of another site"

    @property
    def statuses(self) -> frozenset[int]:
        """The statuses of such a response."""
        return _REFUSED[self]


class End(StrEnum):
    """What the client does after its last byte."""

    ANSWERED = "half-close when answered"
    """It reads as many responses as it sent requests, or until the service is silent, and goes on as HALF_CLOSE."""
    HALF_CLOSE = "half-close"
    """It ends its direction and reads until the service closes."""
    GONE = "gone at once"
    """It resets the connection."""
    HOLD = "held open"
    """It waits until the service closes, because its request is incomplete."""
    UNREAD = "unread"
    """It reads nothing for a moment, then resets the connection."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one write, and the seconds of the pause after it."""

    data: bytes
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One connection."""

    number: int
    kind: str
    pieces: tuple[Piece, ...]
    end: End
    request_ends: tuple[int, ...]
    """Number of bytes after each request."""
    refusal: Refusal | None = None
    """Why the first request must be refused, if the plan is certain of it."""

    @property
    def data(self) -> bytes:
        """All bytes."""
        return b"".join(piece.data for piece in self.pieces)

    @property
    def is_slow(self) -> bool:
        """Whether the connection lasts long because of the client."""
        return self.kind in _SLOW

    def requests(self, sent_size: int) -> int:
        """Return the number of requests of which all bytes are among the first `sent_size`."""
        return bisect_right(self.request_ends, sent_size)


@dataclass(frozen=True, slots=True)
class _Client:
    """What the generators of attacks need."""

    random: Random
    routes: Sequence[Route]

    def route(self) -> Route:
        return self.random.choice(self.routes)

    def damageable(self) -> Route:
        found = self.route()
        while found in UNDAMAGED:
            found = self.route()
        return found

    def request(self, *headers: bytes, body: bytes | None = None, route: Route | None = None) -> bytes:
        """Return a request with valid framing and `headers` in addition."""
        method, path = route or self.damageable()
        target = filled(self.random, path).encode()
        typed: tuple[bytes, ...] = ()
        if body is None:
            body, kind = _body(self.random, (method, path))
            typed = (kind,) if body else ()
        elif body and not any(line.lower().startswith(b"content-type") for line in headers):
            typed = (_JSON,)
        lines = [*_authorized(self.random), *typed, b"Content-Length: %d" % len(body), *headers]
        return _head(method.encode(), target, b"Host: 127.0.0.1", *lines) + body


def plan(seed: int, number: int, routes: Sequence[Route]) -> Plan:
    """Plan the connection `number` of the run `seed` to a service with `routes`, whose order counts."""
    random = Random(f"{seed}:{number}")
    client = _Client(random, routes)
    kind = random.choice(_CHOICES)
    end = random.choice(_ENDS)
    if kind in _SLOW:
        pieces, end, refusal = _SLOW[kind](client)
        return Plan(number, kind, pieces, end, (sum(len(piece.data) for piece in pieces),), refusal)
    refusal = None
    if kind == "valid":
        requests = [client.request(route=client.route()) for _ in range(random.choice((1, 2, 5, 20, 60)))]
    elif kind == "damaged":
        requests = [damaged(random, client.request()) for _ in range(random.choice((1, 1, 2, 5)))]
    elif kind in _REFUSED_ATTACKS:
        requests, refusal = _REFUSED_ATTACKS[kind](client)
    else:
        requests = _ATTACKS[kind](client)
    data = b"".join(requests)
    ends = tuple(accumulate(map(len, requests)))
    uncut = random.random() < 0.7 or len(data) > 5000
    return Plan(number, kind, (Piece(data),) if uncut else _cut(random, data), end, ends, refusal)


def needs_token(route: Route) -> bool:
    """Return whether a service with operators' tokens refuses a request without one. The broker has no such routes."""
    method, path = route
    return method != "GET" and not path.startswith((_BROKER, "/v1/tenants", "/v1/namespaces", "/v1/brokers"))


def filled(random: Random, path: str) -> str:
    """Return `path` with values for its parameters, sometimes with a query."""
    parts = []
    for part in path.split("/"):
        values = _SEGMENTS.get(part, _OTHER_SEGMENTS) if part.startswith("{") else (part,)
        parts.append(random.choice(values))
    found = "/".join(parts)
    if path == "/api/v1/ledger/delete":
        return f"{found}?ledger_id={LEDGER_ID_MIN + random.randrange(100)}"
    if random.random() < 0.5:
        query = [
            f"{name}={random.choice(_QUERY_VALUES)}" for name in random.sample(_QUERY_NAMES, random.randrange(1, 4))
        ]
        found += "?" + "&".join(query)
    return found


def damaged(random: Random, request: bytes) -> bytes:
    """Return `request` with flipped bits, or with removed, inserted or repeated bytes."""
    data = bytearray(request)
    kind = random.randrange(5)
    if kind < 2:
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(data)
    at = random.randrange(len(data))
    if kind == 2:
        return bytes(data[:at] + data[at + random.choice((1, 2, 8, 100)) :])
    if kind == 3:
        return bytes(data[:at] + random.randbytes(random.choice((1, 2, 8, 100))) + data[at:])
    return bytes(data[:at] + data[at : at + 40] * random.choice((2, 3, 100)) + data[at:])


def _cut(random: Random, data: bytes) -> tuple[Piece, ...]:
    pieces, at = [], 0
    while at < len(data):
        size = random.choice((1, 3, 50, 1000))
        pieces.append(Piece(data[at : at + size], 0.001 if random.random() < 0.1 else 0.0))
        at += size
    return tuple(pieces)


def _head(method: bytes, target: bytes, *headers: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join((method + b" " + target + b" " + version, *headers, b"", b""))


def _authorized(random: Random) -> tuple[bytes, ...]:
    kind = random.random()
    if kind < 0.8:
        return (b"Authorization: Bearer " + TOKEN.encode(),)
    return (random.choice(_AUTHORIZATIONS),) if kind < 0.9 else ()


def _body(random: Random, route: Route) -> tuple[bytes, bytes]:
    """Return a body and its content type: usually one that the route accepts, sometimes with a hostile value."""
    members = BODIES.get(route)
    kind = random.random()
    if members is None or kind < 0.2:
        if route[0] == "GET" or route[0] == "DELETE" or kind < 0.1:
            return b"", _JSON
        if kind < 0.15:
            return random.randbytes(random.choice((1, 100, 3000))), random.choice((_JSON, _BYTES))
        members = dict(random.sample(_MEMBERS, random.randrange(len(_MEMBERS))))
    found = dict(members)
    if found and kind > 0.6:
        name = random.choice([*found])
        change = random.randrange(4)
        if change == 0:
            del found[name]
        elif change == 1:
            found[random.choice(_MEMBERS)[0]] = random.choice(_VALUES)
        elif isinstance(found[name], bool):
            found[name] = not found[name]
        else:
            found[name] = random.choice(_VALUES)
    text = json.dumps(found).encode()
    if route == _PRODUCE and random.random() < 0.3:
        return (text + b"\n") * random.choice((1, 2, 20)), _LINES
    return text, _JSON


def _heads(client: _Client) -> tuple[list[bytes], Refusal | None]:
    random = client.random
    method, path = client.damageable()
    target = filled(random, path).encode()
    host = b"Host: 127.0.0.1"
    size, count = random.choice((32_000, 33_000, 40_000, 200_000)), random.choice((99, 100, 101, 5000))
    large: Sequence[Sequence[bytes]] = (
        (host, b"X: " + b"a" * size),
        (host, *[b"X-%d: 1" % n for n in range(count)]),
    )
    if random.random() < 0.3:
        chosen = random.randrange(len(large))
        refusal = Refusal.HEAD if (size > 32_768, count > 99)[chosen] else None
        return [_head(method.encode(), target, *large[chosen])] * random.choice((1, 3)), refusal
    headers: Sequence[Sequence[bytes]] = (
        (host, b"X: a\0b"),
        (host, b"X: a\r\n folded"),
        (host, b"\0: a"),
        (host, b": no name"),
        (host, b"no colon"),
        (host, b"X : space"),
        (host, b"X: \xff\xfe\x80"),
        (host, b"X: a\nY: b"),
        (host, b"Expect: 100-continue", b"Content-Length: 3"),
        (host, b"Expect: " + b"x" * 100),
        (host, b"Range: bytes=" + b"0-," * 2000),
        (host, b"Connection: " + b"close, " * 2000),
        (host, b"Cookie: " + b"a=b; " * 3000),
        (host, b"Accept: " + b"*/*;q=0.1," * 2000),
        (host, b"Authorization: Bearer " + b"a." * 10_000),
        (host, b"traceparent: 00-" + b"0" * 5000),
        (host, b"X-Forwarded-For: " + b"127.0.0.1, " * 1000, b"X-Forwarded-Proto: \xff"),
    )
    return [_head(method.encode(), target, *random.choice(headers)) for _ in range(random.choice((1, 3)))], None


def _request_lines(client: _Client) -> list[bytes]:
    random = client.random
    _, path = client.damageable()
    target = filled(random, path).encode()
    host = b"Host: 127.0.0.1"
    lines: Sequence[bytes] = (
        _head(b"GET", b"http://127.0.0.1" + target, host),
        _head(b"GET", b"http://hostile.example" + target, host),
        _head(b"GET", b"127.0.0.1:80", host),
        _head(b"CONNECT", b"127.0.0.1:80", host),
        _head(b"OPTIONS", b"*", host),
        _head(b"OPTIONS", target, host, b"Access-Control-Request-Method: PUT"),
        _head(b"TRACE", target, host),
        _head(random.choice((b"HEAD", b"PATCH", b"PURGE", b"get", b"M" * 3000, b"")), target, host),
        b"GET " + target + b"\r\n",
        b"GET " + target + b"\r\n\r\n",
        _head(b"GET", target, host, version=random.choice((b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"X"))),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x12\x04\0\0\0\0\0" + bytes(18),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(500),
        _head(b"GET", target, host, b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Version: 13",
              b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
        _head(b"GET", target, host, b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings",
        b"HTTP2-Settings: AAMAAABk"),
        _head(b"GET", target.replace(b"/", random.choice((b"//", b"/./", b"/../", b"%2f", b"%252F", b"\\"))), host),
        _head(b"GET", b"/" + b"../" * random.choice((3, 3000)) + b"etc/passwd", host),
        _head(b"GET", b"/%2e%2e/%00/%ff/%c0%af/%", host),
        _head(b"GET", target + b"/\xff\xfe\x80", host),
        _head(b"GET", target + "/\u0130\u2028".encode(), host),
        _head(b"GET", target + b"?" + b"&".join(b"p%d=%d" % (n, n) for n in range(random.choice((50, 3000)))), host),
        _head(b"GET", target + b"?" + random.choice((b"&" * 20_000, b"=" * 20_000, b"a=%zz&a=%", b"\xff",
        b"max=" + b"9" * 5000)),
              host),
        _head(b"GET", target.split(b"?")[0] + b"#fragment?" + b"x" * 100, host),
        b"\r\n" * random.choice((1, 100, 40_000)) + _head(b"GET", target, host),
        b"GET " + target + b" HTTP/1.1\nHost: 127.0.0.1\n\n",
        random.randbytes(random.choice((1, 100, 50_000))),
    )  # fmt: skip
    return [random.choice(lines)]


def _lengths(client: _Client) -> list[bytes]:
    """Heads whose body has several possible ends, each with a request hidden in it."""
    random = client.random
    method, path = client.damageable()
    hidden = client.request()
    length = random.choice((
        b"-1", b"+5", b"0x10", b"1e3", b" 5", b"5 5", b"5, 5", b"5,6", b"", b"9" * 30, b"18446744073709551616",
        b"9223372036854775807", b"00005", b"5;", b"\xef\xbc\x95", b"1_0",
    ))  # fmt: skip
    framing: Sequence[Sequence[bytes]] = (
        (b"Content-Length: " + length,),
        (b"Content-Length: 5", b"Content-Length: " + length),
        (b"Content-Length: 5", b"Content-Length: 5"),
        (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: " + length),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
        (b"Transfer-Encoding: chunked, identity",),
        (b"Transfer-Encoding: gzip, chunked",),
        (b"Transfer-Encoding: xchunked",),
        (b"Transfer-Encoding : chunked",),
        (b"Transfer-Encoding:\x0bchunked",),
        (b"Transfer-Encoding: \r\n chunked",),
        (b"Content_Length: 5", b"Content-Length : 5"),
    )
    head = _head(method.encode(), filled(random, path).encode(), b"Host: 127.0.0.1", *random.choice(framing))
    return [head + random.choice((b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"hello", b"")), hidden]


def _origins(client: _Client) -> tuple[list[bytes], Refusal]:
    random = client.random
    method, path = client.route()
    target = filled(random, path).encode()
    host = random.choice((
        b"hostile.example", b"127.0.0.1.hostile.example", b"localhost.", b"LOCALHOST", b"[::1]", b"[::ffff:127.0.0.1]",
        b"127.1", b"0", b"0x7f000001", b"2130706433", b"127.0.0.1:99999999999", b"user@127.0.0.1", b"127.0.0.1, x", b"",
        b"a" * 20_000, b"\xff", b"[", b"[::1", b"127.0.0.1/..", b"*",
    ))  # fmt: skip
    foreign = random.choice((
        (b"Origin: http://hostile.example",), (b"Sec-Fetch-Site: cross-site",), (b"Origin: null",),
        (b"Origin: http://127.0.0.1", b"Origin: http://hostile.example"),
        (b"Origin: http://127.0.0.1.hostile.example",),
        (b"Origin: ",), (b"Origin: http://127.0.0.1@hostile.example",), (b"Origin: " + b"x" * 20_000,),
    ))  # fmt: skip
    hosts: Sequence[Sequence[bytes]] = (
        (b"Host: 127.0.0.1", *foreign),
        (b"Host: " + host, b"Origin: http://hostile.example"),
        (b"Host: 127.0.0.1", b"Host: " + host, b"Origin: http://hostile.example"),
        (b"Origin: http://hostile.example",),
    )
    return [
        _head(method.encode(), target, *random.choice(hosts), *_authorized(random), b"Content-Length: 0")
    ], Refusal.ORIGIN


def _refusals(client: _Client) -> tuple[list[bytes], Refusal]:
    """A request that is right except for one thing, for which it must be refused."""
    random = client.random
    route = random.choice([route for route in BODIES if route in client.routes and route not in _REFUSED_LATE])
    is_admin = needs_token(route)
    method, path = route[0].encode(), route[1]
    for name, value in _PLAIN.items():
        path = path.replace(name, value)
    host = b"Host: 127.0.0.1"
    authorization: Sequence[bytes] = (b"Authorization: Bearer " + TOKEN.encode(),)
    kind, coding = _JSON, b""
    body = json.dumps(BODIES[route]).encode()
    refusal = random.choice((Refusal.BODY, Refusal.CODING, *[Refusal.TYPE] * (route != _PRODUCE), Refusal.TOKEN))
    if refusal is Refusal.TOKEN and not is_admin:
        refusal = Refusal.CODING
    if refusal is Refusal.TOKEN:
        authorization = random.choice((*((one,) for one in _AUTHORIZATIONS), (), (*authorization, *authorization)))
    elif refusal is Refusal.CODING:
        coding = b"Content-Encoding: " + random.choice(_CODINGS)
    elif refusal is Refusal.TYPE:
        kind = random.choice(_OTHER_TYPES)
    elif is_admin:
        body = b'{"a": "' + b"x" * random.choice((65_536, 70_000)) + b'"}'
    size = _ANNOUNCED_SIZE if refusal is Refusal.BODY and not is_admin else len(body)
    lines = [line for line in (host, *authorization, kind, coding, b"Content-Length: %d" % size) if line]
    random.shuffle(lines)
    return [_head(method, path.encode(), *lines) + body], refusal


def _bodies(client: _Client) -> list[bytes]:
    random = client.random
    deep = random.choice((10, 1000, 100_000))
    body = random.choice((
        b"[" * deep, b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep, b'{"max":' + b"9" * 10_000 + b"}",
        b'{"max":1e999999}', b'{"max":NaN,"wait_ms":-Infinity}', b'"\xff\xfe\xed\xa0\x80"', b'"\\ud800"', b'{"max":',
        b"", b"null", b"true", b"[]", b"{}", b'{"a":1,"a":2}', b'{"message_ids":[' + b'"x",' * 20_000 + b'"x"]}',
        b'{"value":"' + b"x" * 300_000, b"x" * 300_000, b"\n" * 20_000, b'{"value":1}\n' * 5000, b"\0" * 100,
        b"\xef\xbb\xbf{}", "{\"a\":1}".encode("utf-16"), b"a=b&" * 5000,
        b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb\r\n" * 500, _BOMB,
        _BOMB_IN_BOMB, b"\x1f\x8b" + random.randbytes(100),
    ))  # fmt: skip
    headers = [b"Content-Type: " + random.choice(_CONTENT_TYPES)]
    if random.random() < 0.4:
        headers.append(b"Content-Encoding: " + random.choice(_ENCODINGS))
    request = client.request(*headers, body=body, route=_writer(client))
    if random.random() < 0.2:
        wrong = b"Content-Length: %d" % max(0, len(body) + random.choice((-5, -1, 1, 5)))
        request = request.replace(b"Content-Length: %d" % len(body), wrong, 1)
    return [request]


def _chunkings(client: _Client) -> list[bytes]:
    random = client.random
    method, path = _writer(client)
    head = _head(method.encode(), filled(random, path).encode(), b"Host: 127.0.0.1", *_authorized(random), _JSON,
                 b"Transfer-Encoding: chunked", b"Trailer: Host")  # fmt: skip
    body = random.choice((
        b"g\r\nx\r\n0\r\n\r\n", b"-1\r\nx\r\n", b"0x1\r\nx\r\n0\r\n\r\n", b"ffffffffffffffff\r\nx",
        b"1" + b"0" * 20 + b"\r\n",
        b"7fffffffffffffff\r\nx", b"1;" + b"e" * random.choice((100, 40_000)) + b"\r\nx\r\n0\r\n\r\n", b"1\r\nx" * 2000,
        b"1\r\n{\r\n" + b"1\r\n \r\n" * 5000 + b"1\r\n}\r\n0\r\n\r\n", b"2\r\n{}\r\n", b"2\r\n{}0\r\n\r\n",
        b"2\n{}\n0\n\n",
        b"2\r\n{}\r\n0\r\nHost: hostile.example\r\nContent-Length: 5\r\n\r\n",
        b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * random.choice((100, 101, 5000)) + b"\r\n",
        b"0" * 40_000 + b"2\r\n{}\r\n0\r\n\r\n",
        b"2 \r\n{}\r\n0\r\n\r\n", b"\r\n2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"2\r\n{}\r\n0\r\nX: " + b"y" * 40_000,
    ))  # fmt: skip
    return [head + body]


def _pipelines(client: _Client) -> list[bytes]:
    random = client.random
    requests = [client.request() for _ in range(random.choice((2, 5, 10, 15, 16, 17, 18, 40, 300)))]
    if random.random() < 0.4:
        requests.insert(random.randrange(len(requests)), random.choice((b"\r\n\r\n", b"\0", b"x" * 100, b"0\r\n\r\n")))
    return requests


def _slow_head(client: _Client) -> tuple[tuple[Piece, ...], End, Refusal | None]:
    """A byte at a time, and never the end."""
    head = client.request(body=b"")[:-4]
    sent = head[: client.random.choice((1, 10, 60))]
    return tuple(Piece(bytes((byte,)), 0.02) for byte in sent), End.HOLD, Refusal.LATE_HEAD


def _slow_body(client: _Client) -> tuple[tuple[Piece, ...], End, Refusal | None]:
    size = client.random.choice((100, 5000, 100_000))
    request = client.request(body=b" " * size, route=_writer(client))
    start = request[: len(request) - size]
    return (Piece(start), *[Piece(b" ", 0.02)] * client.random.choice((0, 5, 50))), End.HOLD, None


def _slow_request(client: _Client) -> tuple[tuple[Piece, ...], End, Refusal | None]:
    """A byte at a time, and complete."""
    return tuple(Piece(bytes((byte,)), 0.002) for byte in client.request()[:600]), End.HALF_CLOSE, None


def _unread(client: _Client) -> tuple[tuple[Piece, ...], End, Refusal | None]:
    """Requests whose responses are never read."""
    return (Piece(b"".join(client.request() for _ in range(50)), 0.3),), End.UNREAD, None


def _writer(client: _Client) -> Route:
    """Return a route that takes a body, if there is one."""
    writers = [route for route in client.routes if route[0] in ("POST", "PUT")]
    return client.random.choice(writers or list(client.routes))


_ATTACKS: Final[dict[str, Callable[[_Client], list[bytes]]]] = {
    "request lines": _request_lines,
    "lengths": _lengths,
    "bodies": _bodies,
    "chunkings": _chunkings,
    "pipelines": _pipelines,
}
_REFUSED_ATTACKS: Final[dict[str, Callable[[_Client], tuple[list[bytes], Refusal | None]]]] = {
    "heads": _heads,
    "origins": _origins,
    "refusals": _refusals,
}
_SLOW: Final[dict[str, Callable[[_Client], tuple[tuple[Piece, ...], End, Refusal | None]]]] = {
    "slow head": _slow_head,
    "slow body": _slow_body,
    "slow request": _slow_request,
    "unread": _unread,
}
KINDS: Final = (*[kind for kind in (*_ATTACKS, *_REFUSED_ATTACKS) for _ in range(4)], *_SLOW)
"""Kinds of attacks, the frequent ones repeatedly: slow clients would otherwise take most of the time."""
_CHOICES: Final = (*["valid"] * (len(KINDS) // 3), *["damaged"] * (len(KINDS) // 3), *KINDS)
_ENDS: Final = (*[End.ANSWERED] * 7, End.HALF_CLOSE, End.HALF_CLOSE, End.GONE)

_REFUSED: Final = {
    Refusal.HEAD: frozenset({431}),
    Refusal.LATE_HEAD: frozenset({408}),
    Refusal.BODY: frozenset({413}),
    Refusal.CODING: frozenset({415}),
    Refusal.TYPE: frozenset({415}),
    Refusal.TOKEN: frozenset({401}),
    Refusal.ORIGIN: frozenset({400, 403}),
}
_BROKER: Final = "/v1/topics"
_TOPIC: Final = _BROKER + "/{tenant}/{namespace}/{topic}"
_SUBSCRIPTION: Final = _TOPIC + "/subscriptions/{subscription}"
_PRODUCE: Final = ("POST", f"{_TOPIC}/messages")
_RECOVERY: Final = "/api/v1/autorecovery"
_RETURNED: Final = {"message_ids": ["900000000:0"], "consumer": "c"}
BODIES: Final[Mapping[Route, Mapping[str, object]]] = {
    _PRODUCE: {"payload": "v", "key": "k", "properties": {"a": "b"}, "tags": "t", "event_time": 1, "sequence_id": 1},
    ("PUT", _SUBSCRIPTION): {"initial": "earliest", "tags": "t", "subscription_properties": {"a": "b"}},
    ("POST", f"{_SUBSCRIPTION}/receive"): {
        "consumer": "c", "type": "shared", "initial": "earliest", "max": 10, "max_bytes": 1000, "wait_ms": 0,
        "ack_timeout_ms": 100, "session_ttl_ms": 1000, "redeliver": True, "request_id": "r",
    },
    ("POST", f"{_SUBSCRIPTION}/ack"): _RETURNED,
    ("POST", f"{_SUBSCRIPTION}/nack"): {**_RETURNED, "delay_ms": 10},
    ("POST", f"{_SUBSCRIPTION}/retry"): {**_RETURNED, "delay_ms": 10, "properties": {"a": "b"}, "max_redeliver": 3},
    ("POST", f"{_SUBSCRIPTION}/reset"): {"initial": "latest"},
    ("POST", f"{_SUBSCRIPTION}/seek"): {"message_id": "earliest"},
    ("POST", f"{_SUBSCRIPTION}/dead-letters/redrive"): {"max": 10, "after": "900000000:0", "dry_run": False},
    ("POST", f"{_SUBSCRIPTION}/dead-letters/purge"): {"before": 1, "initial_subscription": "k"},
    ("PUT", "/api/v1/bookie/state/readonly"): {"readOnly": False},
    ("PUT", "/api/v1/bookie/gc"): {"forceMajor": True, "forceMinor": True},
    ("PUT", "/api/v1/bookie/gc/suspend_compaction"): {"suspendMajor": True, "suspendMinor": True},
    ("PUT", "/api/v1/bookie/gc/resume_compaction"): {"resumeMajor": True, "resumeMinor": True},
    ("PUT", "/api/v1/bookie/gc/rollback"): {"accept": True, "version": 0},
    ("PUT", "/api/v1/bookie/entry_location_compact"): {"entryLocationRocksDBCompact": True, "entryLocations": ""},
    ("PUT", "/api/v1/bookie/scrub"): {"shard": 0, "rate": 2**20},
    ("PUT", "/api/v1/bookie/drill"): {"rules": ["datasync *.txn delay 0.2"]},
    ("PUT", f"{_RECOVERY}/lost_bookie_recovery_delay"): {"delay_seconds": 60},
    ("PUT", f"{_RECOVERY}/bookie"): {"bookie_src": ["gone:3181"], "delete_cookie": True},
    ("PUT", f"{_RECOVERY}/decommission"): {"bookie_src": "gone:3181", "delete_cookie": False},
    ("POST", "/v1/recovery/pause"): {"reason": "fuzzed"},
}  # fmt: skip
"""Routes that take a JSON object, with a valid one: fault injection is disabled, and `gone:3181` does not exist."""
_REFUSED_LATE: Final = frozenset({
    ("PUT", "/api/v1/bookie/drill"),
    *(
        ("POST", f"{_SUBSCRIPTION}/{name}")
        for name in ("ack", "nack", "retry", "reset", "seek", "dead-letters/redrive", "dead-letters/purge")
    ),
})  # fmt: skip
"""Routes that can give another response before they check the body: no fault injection, no such topic."""
_PLAIN: Final = {"{tenant}": "public", "{namespace}": "fuzz", "{topic}": "fuzz-0", "{subscription}": "s"}
_ANNOUNCED_SIZE: Final = 64 * 2**20
"""Bytes of a body that no route accepts, and that is not sent."""
_CODINGS: Final = (b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"GZIP", b"identity, gzip", b"x" * 1000)
_OTHER_TYPES: Final = (
    b"",
    b"Content-Type: text/plain",
    b"Content-Type: application/x-www-form-urlencoded",
    b"Content-Type: multipart/form-data; boundary=x",
    b"Content-Type: application/jsonp",
    b"Content-Type: text/plain, application/json",
    b"Content-Type:",
    b"Content-Type: application/json\r\nContent-Type: application/json",
)
_BOMB: Final = gzip.compress(bytes(2_000_000), mtime=0)
_BOMB_IN_BOMB: Final = gzip.compress(_BOMB, mtime=0)
_JSON: Final = b"Content-Type: application/json"
_BYTES: Final = b"Content-Type: application/octet-stream"
_LINES: Final = b"Content-Type: application/x-ndjson"
_AUTHORIZATIONS: Final = (
    b"Authorization: Bearer wrong",
    b"Authorization: Bearer \xff\x00"[:-1],
    b"Authorization: Basic dTpw",
    b"Authorization:",
    b"Authorization: Bearer eyJhbGciOiJub25lIn0.e30.",
)
_CONTENT_TYPES: Final = (
    b"application/json", b"application/x-ndjson", b"application/octet-stream", b"text/plain",
    b"multipart/form-data; boundary=x",
    b"application/x-www-form-urlencoded", b"application/json; charset=utf-16", b"", b"\xff",
    b"a" * 5000, b"application/json,text/plain",
)  # fmt: skip
_ENCODINGS: Final = (b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"identity", b"GZIP", b"", b"x" * 1000)
_TOPIC_NAMES: Final = (
    *(f"fuzz-{number}" for number in range(TOPICS)),
    "missing",
    "%00",
    "a" * 300,
    "%F0%9F%90%99",
)
_SEGMENTS: Final = {
    "{tenant}": ("public",) * 8 + ("fuzz", "..", "%2F"),
    "{namespace}": ("fuzz",) * 8 + ("missing", ".", "%E2%80%A8"),
    "{topic}": _TOPIC_NAMES,
    "{subscription}": ("s", "s", "t", "missing", "%0A", "b" * 300),
    "{message_id}": ("0:0", "900000000:0:-1:0", "x", "-1", "9" * 40, "earliest"),
    "{id}": ("900000000", "-1", "x", "9" * 40),
    "{local}": _TOPIC_NAMES,
    "{policy}": ("message_ttl_s", "retention", "none", "%00"),
    "{role}": ("clerk", "missing", "%0A", "b" * 300),
    "{producer}": ("p", "missing", "%0A", "b" * 300),
    "{version}": ("0", "-1", "x", "9" * 40),
}
_OTHER_SEGMENTS: Final = ("x", "0", "%00")
_QUERY_NAMES: Final = (
    "start", "max", "wait_ms", "key", "ledger_id", "start_entry_id", "end_entry_id", "file_type", "type", "limit",
    "consumer",
    "after", "page", "page_token", "log", "print_metadata", "force", "initial", "max_bytes", "prefix", "bookie",
)  # fmt: skip
_QUERY_VALUES: Final = (
    "0", "1", "-1", "10", "9223372036854775807", "9" * 400, "900000000", "true", "x", "", "%FF", "%00", "1e9", "NaN",
    "earliest",
    "latest", "journal", "rw", "a" * 500,
)  # fmt: skip
_MEMBERS: Final = (
    ("max", 1), ("wait_ms", 0), ("readOnly", True), ("consumer", "c"), ("initial", "earliest"),
    ("message_ids", ["900000000:0"]),
    ("value", "v"),
    ("key", "k"), ("messages", [{"value": "v"}]), ("position", "earliest"), ("type", "shared"), ("delay", 120),
    ("bookie_src", ["gone:3181"]), ("entry_location_compact", False), ("delay_seconds", 60),
)  # fmt: skip
_VALUES: Final[tuple[object, ...]] = (
    None,
    -1,
    2**63,
    2**70,
    1e308,
    "",
    "x" * 1000,
    "\ud800",
    "\0",
    [],
    {},
    [[]] * 50,
    True,
    {"a": {"b": []}},
)
