"""Redirects of clients to the broker that owns a topic (307), and the address at which they reach it.

| the request                                     | `Location` begins with                                          |
|-------------------------------------------------|-----------------------------------------------------------------|
| names a listener: `listener`, `listenerName`    | the owner's address of that listener; 400 if the owner has none |
| came to an address of a listener of this broker | the owner's address of the same listener, if the owner has it   |
| any other                                       | the address of the owner for other brokers                      |

If both brokers have the same address there, such as that of a load balancer, the redirect could form a loop: the
request is passed on instead. `listenerName` is the parameter of Pulsar's calls.
"""

from typing import Final

from bindery_core.errors import BadRequest

from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.ownership.listeners import Listeners, authority, with_port
from bindery_broker.ownership.ownership import RemoteOwner

_YES: Final = frozenset(("true", "1", "yes", "on", "t", "y"))
"""What the models of the parameters accept as true, in lower case."""


class Redirects:
    """`listeners`: those of this broker."""

    def __init__(self, listeners: Listeners) -> None:
        self._own = listeners
        self._names: dict[str, str] = {}
        """Host header -> name of the listener that has this address."""
        for name, one in listeners.items():
            for address in filter(None, (one.broker_http_url, one.broker_https_url)):
                self._names[authority(address)] = name

    def to(self, exchange: Exchange, owner: RemoteOwner) -> Reply | None:
        """Return the redirect that the request has asked for; None: it has asked for none, or it must be passed on.
        Raises BadRequest if the owner has no such listener."""
        if b"redirect=" not in exchange.scope["query_string"]:
            return None
        if exchange.query_params.get("redirect", "").lower() not in _YES:
            return None
        name, url = self._choice(exchange, owner)
        if name in self._own and url == self._own[name].url(scheme=exchange.scope["scheme"]):
            return None
        return redirect(exchange, url or owner.http_url)

    def always(self, exchange: Exchange, owner: RemoteOwner) -> Reply:
        """Return a redirect, also without a parameter that asks for it. Raises BadRequest as above."""
        return redirect(exchange, self._choice(exchange, owner)[1] or owner.http_url)

    def may_choose(self, exchange: Exchange) -> bool:
        """Return whether the request, or the address that it came to, may name a listener."""
        return bool(self._names) or _named(exchange) != ""

    def _choice(self, exchange: Exchange, owner: RemoteOwner) -> tuple[str, str]:
        """Return the name of the client's listener, and the owner's address there; empty: there is none."""
        scheme = exchange.scope["scheme"]
        name = _named(exchange)
        if name:
            found = owner.listeners.get(name)
            if found is None:
                raise BadRequest(
                    "the broker that owns the topic has no listener of this name; set advertised_listeners there, or "
                    "ask without a name",
                    listener=name[:64],
                    owner=owner.http_url,
                    known=sorted(owner.listeners),
                )
            return name, found.url(scheme=scheme)
        if self._names:
            name = self._names.get(with_port(exchange.header(b"host").decode("latin-1"), scheme=scheme), "")
            if name in owner.listeners:
                return name, owner.listeners[name].url(scheme=scheme)
        return "", ""


def _named(exchange: Exchange) -> str:
    return exchange.query_params.get("listener") or exchange.query_params.get("listenerName") or ""


def redirect(exchange: Exchange, url: str) -> Reply:
    """Return a 307 redirect to the same path at `url`."""
    location = url.rstrip("/").encode() + exchange.raw_path
    if exchange.scope["query_string"]:
        location += b"?" + exchange.scope["query_string"]
    return Reply(307, b"", b"text/plain", ((b"location", location),))
