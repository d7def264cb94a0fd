"""Give bundles to the brokers that are chosen by load, and move them there.

A broker is asked to take a bundle by `POST /v1/namespaces/T/N/take`. It never passes that on: it takes the bundle, or
answers who owns it. So the path of a request has one step at most, whatever brokers choose at the same time. A broker
that does not answer is not chosen again for a while, and another one is asked. If none answers, the broker that has the
request takes the bundle, as it does alone.
"""

from typing import Final

import msgspec
from bindery_core.errors import BinderyError, OutcomeUnknown, TooManyRequests
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_pulsar import znode_layout

from bindery_broker.broker import Broker
from bindery_broker.errors import NotOwner
from bindery_broker.http.peers.unloads import Unloads, ask_to_take
from bindery_broker.http.proxy import Proxy
from bindery_broker.namespaces.records import HASH_MAX
from bindery_broker.ownership.bundles import Bundle

ASKED_MAX: Final = 2
"""Maximum number of other brokers that are asked to take a bundle, while requests for its topics wait."""
TAKE_TIMEOUT_S: Final = 3.0
"""Maximum seconds to wait for the answer of one. Taking a bundle is a few requests to the metadata store."""

log = get_logger(__name__)


class Taken(msgspec.Struct):
    """The part of the answer that counts."""

    owner: str | None = None
    """Address of the broker that owns the bundle now."""


class Assignments:
    """An `ownership.Assigner`, and the `balancing.Peers` of the leader."""

    def __init__(self, broker: Broker, proxy: Proxy, unloads: Unloads) -> None:
        self._broker = broker
        self._proxy = proxy
        self._unloads = unloads

    def is_elsewhere(self, bundle: Bundle) -> bool:
        balancing = self._broker.balancing
        return balancing.peek(bundle) not in (None, balancing.name)

    async def assign(self, bundle: Bundle) -> None:
        balancing, asked = self._broker.balancing, set[str]()
        while len(asked) < ASKED_MAX:
            chosen = balancing.choose(bundle, exclude=asked)
            if chosen is None or chosen == balancing.name:
                return
            asked.add(chosen)
            if await self.take(bundle, chosen):
                balancing.assigned += 1
                return
            balancing.not_taken(bundle)

    async def take(self, bundle: Bundle, broker: str) -> bool:
        """Ask a broker of Bindery, `host:port`, to take a bundle. Returns whether the bundle has an owner now, which
        may be another one."""
        balancing = self._broker.balancing
        url = balancing.url_of(broker)
        if url is None:
            return False
        try:
            status, answer = await ask_to_take(self._proxy, url, bundle, timeout_s=TAKE_TIMEOUT_S)
        except (NotOwner, OutcomeUnknown, TooManyRequests) as error:
            log.warning("bundle_not_taken", bundle=str(bundle), broker=broker, **error_fields(error))
            balancing.suspect(broker)
            return False
        if status >= 300:
            log.warning("bundle_not_taken", bundle=str(bundle), broker=broker, status=status)
            if status != NotOwner.status:  # refused or not known there: the next answer would be the same
                balancing.suspect(broker)
            return False
        try:
            return bool(msgspec.json.decode(answer, type=Taken).owner)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False

    async def move(self, bundle: str, destination: str) -> bool:
        found = parse_bundle(bundle)
        url = self._broker.balancing.url_of(destination)
        if found is None or url is None:
            return False
        await self._unloads.unload([found], hold_s=None, destination=destination)
        return await self._broker.owner_url(found) == url


def parse_bundle(text: str) -> Bundle | None:
    """Return the bundle of a load report, `tenant/namespace/0x..._0x...`; None: it is none."""
    parts = text.split("/")
    if len(parts) != 3:
        return None
    lower, _, upper = parts[2].partition("_")
    try:
        found = Bundle(parts[0], parts[1], int(lower, 16), int(upper, 16))
    except ValueError:
        return None
    if not 0 <= found.lower < found.upper <= HASH_MAX or found.name != parts[2]:
        return None
    try:
        znode_layout.bundle_owner(tenant=found.tenant, namespace=found.namespace, bundle=found.name)
    except BinderyError:
        return None
    return found
