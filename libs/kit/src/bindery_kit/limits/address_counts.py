"""AddressCounts: the number of open connections per client address, so that one machine cannot take all of a port.

| peer name of the socket     | counted as                                                          |
|-----------------------------|---------------------------------------------------------------------|
| an IPv4 address             | this address                                                        |
| an IPv4 address in IPv6     | the IPv4 address (`::ffff:10.0.0.1` is `10.0.0.1`)                  |
| an IPv6 address             | its network of 64 bits, which one machine usually has for itself    |
| anything else               | one group of all such peers                                         |
"""

import ipaddress
from typing import Any, Final

NO_ADDRESS: Final = "?"
"""Group of peers without an address, for example of a Unix socket."""
_IPV6_NETWORK_BITS: Final = 64


def group_of(peer: Any) -> str:
    """Return the group that a peer name (`get_extra_info("peername")`) is counted in."""
    if not isinstance(peer, tuple) or not peer:
        return NO_ADDRESS
    text = str(peer[0])
    if ":" not in text:
        return text or NO_ADDRESS
    try:
        address = ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return text
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _IPV6_NETWORK_BITS), strict=False))


class AddressCounts:
    """Invariant: groups without a connection are not kept, so that memory is bounded by the open connections."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, group: str) -> int:
        return self._counts.get(group, 0)

    @property
    def largest(self) -> str | None:
        """The group with the most connections; None if there is none. Takes time in proportion to the groups."""
        return max(self._counts, key=self._counts.__getitem__, default=None)

    def add(self, group: str) -> int:
        """Count one more connection. Return the number of connections of the group."""
        count = self._counts[group] = self._counts.get(group, 0) + 1
        return count

    def remove(self, group: str) -> None:
        """Count one connection less."""
        count = self._counts[group] - 1
        if count:
            self._counts[group] = count
        else:
            del self._counts[group]
