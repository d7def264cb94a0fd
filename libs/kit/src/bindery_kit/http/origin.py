"""Origin checks: refuse requests that a web page of another site makes in a visitor's browser.

A browser on the machine, or in the network, of a cluster lets every web page send requests to it. The checks apply to
all methods and paths of a port, before authentication and before the application.

| request                                                        | response                                       |
|----------------------------------------------------------------|------------------------------------------------|
| `Host` is missing in HTTP/1.1, repeated, or no host            | 400                                            |
| `Host` is not allowed (`HostPolicy`)                           | 403: the page's own name may resolve to this   |
|                                                                | machine (DNS rebinding)                        |
| `Origin` differs from `http://<Host>` and `https://<Host>`,    | 403                                            |
| is `null`, or is repeated, and is not configured               |                                                |
| `Sec-Fetch-Site` is neither `same-origin` nor `none`, without  | 403, except for a link (`Sec-Fetch-Mode:       |
| a configured origin: `cross-site`; `same-site`, for example a  | navigate`, `-Dest: document`, GET or HEAD) to  |
| page of another port of this machine                           | a path in `pages`                              |
| `Sec-Purpose` or `Purpose` contains `prefetch`, and not        | 403: a page can make the browser fetch an      |
| `Sec-Fetch-Site: same-origin`                                  | address ahead, as if the visitor had typed it  |

Browsers send `Origin` with every request of a page whose method is not safe, and pages cannot set these headers. Some
safe methods have an effect, too (they lease messages, or write a test ledger), so `Origin` alone does not suffice.
Requests without these headers come from programs, or from a visitor who typed the address. Browsers send no
`Sec-Fetch-...` headers to addresses that are neither loopback nor HTTPS.

Sources: Fetch standard, sections "Origin header" and "CORS protocol"; W3C Fetch Metadata; RFC 9110 sections 7.2, 9.2.1;
WICG Prefetch (Chromium sends `Sec-Fetch-Site: none` with a prefetch of speculation rules to another site).
"""

import functools
import ipaddress
import re
import socket
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final

from bindery_core.errors import BadRequest, BinderyError

from bindery_kit.access.audit_trail import entry_of
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.listening import is_loopback
from bindery_kit.http.problem import problem_of
from bindery_kit.observability.health import AsgiApp, Receive, Scope, Send

REMEMBERED_MAX: Final = 1024
"""Maximum number of combinations of header values whose verdict is cached."""
REMEMBERED_SIZE_MAX: Final = 512
"""Maximum bytes of header values whose verdict is cached."""
OWN_SITES: Final = frozenset((b"", b"none", b"same-origin"))
"""Values of Sec-Fetch-Site for requests of the port's own pages, and of visitors."""
READ_HEADERS: Final = frozenset(
    (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-purpose", b"purpose")
)
"""Names of the headers that the checks read."""
_AUTHORITY: Final = re.compile(rb"(\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(?::[0-9]{0,5})?")
_ORIGIN: Final = re.compile(rb"https?://([^/?#@\\]+)", re.IGNORECASE)
_PATTERN: Final = re.compile(r"(\*\.)?[0-9a-z._-]{1,253}|\[?[0-9a-f:.]{2,45}\]?")
_ORIGIN_SETTING: Final = re.compile(r"https?://[^/?#@\\\s,]+")


class HostNotAllowed(BinderyError):
    status = 403
    code = "host_not_allowed"


class OriginNotAllowed(BinderyError):
    status = 403
    code = "origin_not_allowed"


class HostPolicy:
    """The hosts that requests may name. `bound`: the address that the port listens on. `own_names`: further names of
    this port, for example the advertised one. Names are compared without case, port and final dot."""

    def __init__(self, *, bound: str, hosts: str = "", own_names: Iterable[str] = ()) -> None:
        """Raises BadRequest for a setting `hosts` that is not a list of host names."""
        self.accepts_addresses = not is_loopback(bound)
        """Whether every IP address is allowed: then other machines can connect, possibly through address translation. A
        page cannot pose as an address, because its own name is in `Host`."""
        self._names = {"localhost", _plain(bound), *(_plain(name) for name in own_names if name)}
        self._suffixes: list[str] = []
        if self.accepts_addresses:
            self._names.add(_plain(socket.gethostname()))
        for entry in (entry.strip().lower() for entry in hosts.split(",")):
            if not entry:
                continue
            if not _PATTERN.fullmatch(entry):
                raise BadRequest("http.hosts is a list of host names without port, separated by commas", found=entry)
            if entry.startswith("*."):
                self._suffixes.append(entry[1:].rstrip("."))
            else:
                self._names.add(_plain(entry))

    def allows(self, host: str) -> bool:
        """`host`: as in the Host header, without its port."""
        name = _plain(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return any(name.endswith(suffix) and name != suffix for suffix in self._suffixes)
        return address.is_loopback or self.accepts_addresses


class OriginPolicy:
    """The checks of one port. `origins`: setting of the same name. `pages`: paths to which other sites may link."""

    def __init__(self, hosts: HostPolicy, *, origins: str = "", pages: Sequence[str] = ()) -> None:
        """Raises BadRequest for a setting `origins` that is not a list of origins."""
        self._hosts = hosts
        self._pages = frozenset(pages)
        self._origins: set[bytes] = set()
        for entry in (entry.strip().lower() for entry in origins.split(",")):
            if not entry:
                continue
            if not _ORIGIN_SETTING.fullmatch(entry):
                raise BadRequest(
                    "http.origins is a list of origins such as https://console.example.com, separated by commas",
                    found=entry,
                )
            self._origins.add(entry.encode())
        self._remembered = functools.lru_cache(REMEMBERED_MAX)(self._judge)
        self._allowed_hosts: set[tuple[bytes, bytes]] = set()
        """Headers with which a request is allowed that has no other of READ_HEADERS, as those of programs."""

    def refusal(self, scope: Scope) -> BinderyError | None:
        """Return why the request of an ASGI scope is refused; None: it is not."""
        found = []
        for header in scope["headers"]:
            if header[0] in READ_HEADERS:
                found.append(header)
        if len(found) == 1 and found[0] in self._allowed_hosts:
            return None
        seen = tuple(found)
        is_page = scope["path"] in self._pages and scope["method"] in ("GET", "HEAD")
        is_http_1_0 = scope.get("http_version") == "1.0"
        if sum(len(value) for _, value in seen) > REMEMBERED_SIZE_MAX:
            return self._judge(seen, is_page, is_http_1_0)
        refusal = self._remembered(seen, is_page, is_http_1_0)
        if refusal is None and len(seen) == 1 and seen[0][0] == b"host" and len(self._allowed_hosts) < REMEMBERED_MAX:
            self._allowed_hosts.add(seen[0])
        return refusal

    def _judge(self, seen: tuple[tuple[bytes, bytes], ...], is_page: bool, is_http_1_0: bool) -> BinderyError | None:
        """`seen`: the headers that the checks read. `is_page`: whether it is a page to which other sites may link."""

        def values(name: bytes) -> list[bytes]:
            return [value for found, value in seen if found == name]

        hosts, origins = values(b"host"), values(b"origin")
        if not hosts and is_http_1_0:
            authority = b""
        elif len(hosts) != 1 or not (found := _AUTHORITY.fullmatch(hosts[0])):
            return BadRequest("one header Host with a host name or address is required")
        else:
            authority = hosts[0].lower()
            host = found[1].decode("ascii")
            if not self._hosts.allows(host):
                return HostNotAllowed(
                    f"this port does not serve the host {host[:100]}: if it is a name of this service, add it to the "
                    "setting http.hosts"
                )
        if origins:
            origin = origins[0].lower()
            if len(origins) > 1 or not (origin in self._origins or _is_origin_of(origin, authority)):
                return OriginNotAllowed(
                    "the request comes from a web page of another site: if it is a trusted one, add its origin to the "
                    "setting http.origins",
                    origin=origins[0][:100].decode("ascii", "replace"),
                )
            if origin in self._origins:
                return None
        sites = {value.strip().lower() for value in values(b"sec-fetch-site")}
        is_ahead = any(b"prefetch" in value.lower() for value in (*values(b"sec-purpose"), *values(b"purpose")))
        if is_ahead and sites != {b"same-origin"}:
            return OriginNotAllowed("this port serves no request that a browser makes ahead: open the address")
        is_link = (
            is_page
            and values(b"sec-fetch-mode")[-1:] == [b"navigate"]
            and values(b"sec-fetch-dest")[-1:] == [b"document"]
        )
        if not (sites <= OWN_SITES or is_link):
            return OriginNotAllowed("the request comes from a web page of another site or port")
        return None


class OriginGuard:
    """The application of a port behind the checks."""

    def __init__(self, app: AsgiApp, policy: OriginPolicy, stats: HttpStats) -> None:
        self._app = app
        self._policy = policy
        self._stats = stats

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            error = self._policy.refusal(scope)
            if error is not None:
                self._stats.count(error.code)
                if (entry := entry_of(scope)) is not None:
                    entry.code = error.code
                return problem_of(error)(scope, receive, send)
        return self._app(scope, receive, send)


def origin_policy(
    settings: HttpSettings, *, bound: str, own_names: Iterable[str] = (), pages: Sequence[str] = ()
) -> OriginPolicy:
    """Return the checks of a port. Raises BadRequest for settings that cannot be read."""
    hosts = HostPolicy(bound=bound, hosts=settings.hosts, own_names=own_names)
    return OriginPolicy(hosts, origins=settings.origins, pages=pages)


def _is_origin_of(origin: bytes, authority: bytes) -> bool:
    """Return whether an Origin names the host and port of the request. The scheme may differ behind a proxy."""
    found = _ORIGIN.fullmatch(origin)
    if found is None or not authority:
        return False
    host, port = _split(found[1])
    asked_host, asked_port = _split(authority)
    default = b"443" if origin.startswith(b"https") else b"80"
    return host == asked_host and (port or default) in ((asked_port,) if asked_port else (b"80", b"443"))


def _split(authority: bytes) -> tuple[bytes, bytes]:
    """Return host and port; an empty port if there is none."""
    host, colon, port = authority.rpartition(b":")
    return (host, port) if colon and not authority.endswith(b"]") else (authority.rstrip(b":"), b"")


def _plain(host: str) -> str:
    """Return a host name or address in the form in which hosts are compared."""
    text = host.strip().lower().strip("[]").rstrip(".")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
