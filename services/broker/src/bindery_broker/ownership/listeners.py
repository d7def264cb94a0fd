"""Listeners of a broker: named addresses, each for the clients of one network.

| form    | example                                                    | where                                       |
|---------|------------------------------------------------------------|---------------------------------------------|
| setting | `external:https://b0.example.com:8443,lan:http://10.0.0.7` | `advertised_listeners`                      |
| JSON    | `{"external": {"brokerHttpsUrl": "https://..."}}`          | `advertisedListeners` of records in metadata |

A name may have an address for each scheme. Source: Pulsar's setting advertisedListeners, MultipleListenerValidator,
AdvertisedListener.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

LISTENERS_MAX: Final = 16
"""Maximum number of names of one broker."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_URL: Final = re.compile(r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Listener(msgspec.Struct, rename="camel", frozen=True, omit_defaults=True):
    """Addresses of a broker for clients in one network; empty: none of this scheme. Source: Pulsar's
    AdvertisedListener, without its addresses of the binary protocol."""

    broker_http_url: str = ""
    broker_https_url: str = ""

    def url(self, *, scheme: str) -> str:
        """Return the address of this scheme, or that of the other one."""
        first, second = self.broker_http_url, self.broker_https_url
        return (second or first) if scheme == "https" else (first or second)


Listeners = Mapping[str, Listener]
"""By the name of the listener, such as `external`."""


def parse_listeners(text: str) -> Listeners:
    """Return the listeners of the setting. Raises ValueError."""
    found: dict[str, Listener] = {}
    owners: dict[str, str] = {}
    for entry in (entry.strip() for entry in text.split(",")):
        if not entry:
            continue
        name, _, url = entry.partition(":")
        if not _NAME.fullmatch(name) or "://" not in url:
            raise ValueError(
                f"advertised_listeners: {entry!r} is not NAME:URL. Write for example "
                "external:https://broker-0.example.com:8443; a name has up to 64 letters, digits, - and _"
            )
        if not is_address(url):
            raise ValueError(
                f"advertised_listeners: {url!r} is not the address of a web service: it begins with http:// or "
                "https:// and has a host, perhaps a port, and no path"
            )
        member = "broker_https_url" if url.lower().startswith("https:") else "broker_http_url"
        before = found.get(name, Listener())
        if getattr(before, member):
            raise ValueError(f"advertised_listeners: {name} has two addresses of one scheme: remove one of them")
        if owners.setdefault(authority(url), name) != name:
            raise ValueError(
                f"advertised_listeners: {url} belongs to {owners[authority(url)]} and to {name}, so that a request "
                "would not show which one its client uses: remove one of them"
            )
        found[name] = msgspec.structs.replace(before, **{member: url})
    if len(found) > LISTENERS_MAX:
        raise ValueError(f"advertised_listeners: at most {LISTENERS_MAX} names, found {len(found)}")
    return found


def listeners_of(stored: Mapping[str, object]) -> Listeners:
    """Return the listeners in a record of a broker of either kind, without those that cannot be read."""
    found: dict[str, Listener] = {}
    for name, value in stored.items():
        if len(found) >= LISTENERS_MAX:
            break
        if not _NAME.fullmatch(name) or not isinstance(value, Mapping):
            continue
        urls = [value.get("brokerHttpUrl"), value.get("brokerHttpsUrl")]
        http, https = (url if isinstance(url, str) and is_address(url) else "" for url in urls)
        if http or https:
            found[name] = Listener(http, https)
    return found


def hosts_of(listeners: Listeners) -> set[str]:
    """Return the host names and IP addresses, without ports."""
    urls = [url for one in listeners.values() for url in (one.broker_http_url, one.broker_https_url)]
    return {urlsplit(url).hostname or "" for url in urls if url}


def is_address(url: str) -> bool:
    """Return whether a text is the address of a web service without a path, which may stand in a header."""
    if not _URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def authority(url: str) -> str:
    """Return host and port of an address in lower case; the default port of its scheme is left out."""
    parts = urlsplit(url.lower())
    return with_port(parts.netloc, scheme=parts.scheme)


def with_port(host: str, *, scheme: str) -> str:
    """Return the Host header of a request of this scheme as `authority` does."""
    host = host.lower()
    return host.removesuffix(f":{_DEFAULT_PORTS.get(scheme, 0)}")
