"""Prove between brokers that a request was passed on by a broker, so that limits count it once.

Any client can send the header `bindery-proxied`. Brokers with limits or authentication therefore share a key, which is
in ZooKeeper and never leaves the brokers, and send a second header with it:

    bindery-passed-on: <proof> <part> <client>

| field  | value                                                                                                |
|--------|------------------------------------------------------------------------------------------------------|
| proof  | HMAC-SHA256 of the rest of the value, its length before it, under the key; 64 hexadecimal digits     |
| part   | `1`: the request concerns a partition, on behalf of one to the whole topic; `0`: any other request;  |
|        | `-`: any request of a broker without limits, which has charged it to nobody                          |
| client | whose limits count: `role:<name>` or `address:<name>`, percent-encoded; `-`: nobody's                |

A broker counts nothing for a request with a valid proof of a broker with limits, except for the topics that it creates,
of which the first broker does not know. A header without a valid proof is ignored. The proof covers the client, so that
one that was seen in the network does not serve for another client; who can read the network between brokers can repeat
it for the same.
"""

import hmac
from hashlib import sha256
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from bindery_core.errors import AlreadyExists, BadRequest, NoSuchNode
from bindery_core.sources import RandomBits
from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores.parents import create_with_parents
from bindery_metadata.stores.store import MetadataStore

from bindery_broker.limits.accounts import Owner

PASSED_ON_HEADER: Final = b"bindery-passed-on"
KEY_PATH: Final = f"{BINDERY_ROOT}/passed-on-key"
"""Node with the key of all brokers, KEY_SIZE random bytes. It is created by the first broker with limits or
authentication."""
KEY_SIZE: Final = 32
_CLIENTS: Final = (Owner.ROLE, Owner.ADDRESS)


class Sender(NamedTuple):
    """What a broker says of a request that it passes on."""

    is_part: bool
    client: tuple[Owner, str] | None
    is_charged: bool = True
    """Whether the broker has charged the request; False: it has no limits."""


class PassedOn:
    """`key`: that of all brokers, KEY_SIZE bytes."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_SIZE:
            raise BadRequest("the key of the brokers has a wrong size; delete the node, and restart", path=KEY_PATH)
        self._key = key

    def header(self, sender: Sender) -> tuple[bytes, bytes]:
        """Return the header of a request that is passed on."""
        client = "-" if sender.client is None else quote(f"{sender.client[0]}:{sender.client[1]}", safe=":")
        part = str(int(sender.is_part)) if sender.is_charged else "-"
        rest = f"{part} {client}".encode()
        return PASSED_ON_HEADER, self._proof(rest) + b" " + rest

    def read(self, value: bytes) -> Sender | None:
        """Return what the broker says; None: no broker has sent this."""
        proof, _, rest = value.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(rest)):
            return None
        part, _, client = rest.decode().partition(" ")
        owner, _, name = unquote(client).partition(":")
        known = next((one for one in _CLIENTS if one == owner), None)
        return Sender(part == "1", None if known is None else (known, name), part != "-")

    def _proof(self, rest: bytes) -> bytes:
        return hmac.digest(self._key, b"%d %b" % (len(rest), rest), sha256).hex().encode()


async def fetch_key(store: MetadataStore, *, randomness: RandomBits) -> bytes:
    """Return the key of all brokers; create it if there is none. Raises MetadataUnavailable."""
    try:
        return (await store.get(KEY_PATH)).data
    except NoSuchNode:
        key = randomness.getrandbits(8 * KEY_SIZE).to_bytes(KEY_SIZE, "big")
    try:
        await create_with_parents(store, KEY_PATH, key)
    except AlreadyExists:
        return (await store.get(KEY_PATH)).data
    return key
