"""Topic names: `persistent://tenant/namespace/local[-partition-N]`.

| written                     | means                                    |
|-----------------------------|------------------------------------------|
| `x`                         | `persistent://public/default/x`          |
| `t/n/x`                     | `persistent://t/n/x`                     |
| `persistent://t/n/x`        | itself                                   |
| `non-persistent://...`      | refused: all topics are persistent       |

Tenant and namespace: 1 to 128 characters, each an ASCII letter, a digit or one of `-=:._`. Local name: any characters
except `/` and ASCII control characters, 1 to 255 bytes when encoded for ZooKeeper. Partition N is decimal without
leading zeros. Pulsar's clients can create names with other control characters, which therefore are valid here; Bindery
creates none (`check_new_name`).
Source: Pulsar TopicName, NamedEntity, NamespaceBundles.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Final, Self

from bindery_core.errors import BadRequest, TooLarge

from bindery_pulsar import znode_layout

TENANT_DEFAULT: Final = "public"
NAMESPACE_DEFAULT: Final = "default"
NAME_SIZE_MAX: Final = 128
"""Maximum characters of a tenant and of a namespace."""
LOCAL_NAME_SIZE_MAX: Final = 255
"""Maximum bytes of the encoded local name: longer path parts cause problems in ZooKeeper's tools and in logs."""
SUBSCRIPTION_SIZE_MAX: Final = 255
"""Maximum bytes of the encoded subscription name."""
TOPIC_TEXT_SIZE_MAX: Final = 2_048
"""Maximum characters of a topic name in full or short form."""

_NAME = re.compile(r"[-=:.\w]+", re.ASCII)
_PARTITION = re.compile(r"(?P<base>.+)-partition-(?P<index>0|[1-9][0-9]{0,9})", re.ASCII | re.DOTALL)
_ASCII_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PARTITION_MAX = 2**31 - 1
_PERSISTENT = "persistent://"
_NON_PERSISTENT = "non-persistent://"


@dataclass(frozen=True, slots=True)
class TopicName:
    """The valid name of a persistent topic. Create it with `parse` or `of`."""

    tenant: str
    namespace: str
    local: str
    """Local name, including the `-partition-N` suffix if there is one."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a topic name in full or short form. Raises BadRequest, or TooLarge if a part is too long."""
        if len(text) > TOPIC_TEXT_SIZE_MAX:
            raise TooLarge("topic name is too long", size=len(text), size_max=TOPIC_TEXT_SIZE_MAX)
        if text.startswith(_NON_PERSISTENT):
            raise BadRequest("non-persistent topics are not supported", topic=text)
        rest = text.removeprefix(_PERSISTENT)
        if "://" in rest:
            raise BadRequest("unknown topic domain, want persistent://", topic=text)
        parts = rest.split("/")
        if len(parts) == 1 and rest is text:
            return cls.of(tenant=TENANT_DEFAULT, namespace=NAMESPACE_DEFAULT, local=parts[0])
        if len(parts) != 3:
            raise BadRequest("not a topic name, want tenant/namespace/topic", topic=text)
        return cls.of(tenant=parts[0], namespace=parts[1], local=parts[2])

    @classmethod
    def of(cls, *, tenant: str, namespace: str, local: str) -> Self:
        """Create a topic name from its parts. `local` is plain text, not encoded. Raises the errors of `parse`."""
        for kind, name in (("tenant", tenant), ("namespace", namespace)):
            if not _NAME.fullmatch(name) or name in (".", ".."):
                raise BadRequest(f"not a {kind} name: letters, digits and -=:._ only", name=name[:NAME_SIZE_MAX])
            if len(name) > NAME_SIZE_MAX:
                raise TooLarge(f"{kind} name is too long", size=len(name), size_max=NAME_SIZE_MAX)
        _check_free_name("topic", local, LOCAL_NAME_SIZE_MAX)
        if "/" in local:
            raise BadRequest("a topic's local name holds no slash", topic=local)
        return cls(tenant, namespace, local)

    @classmethod
    def from_managed_ledger_name(cls, name: str) -> Self:
        """Return the topic name of a `managed_ledger_name`. Raises the errors of `parse`.

        Raises BadRequest also if the name has another form, or if its local part is not UTF-8 once decoded.
        """
        parts = name.split("/")
        if len(parts) != 4 or parts[2] != "persistent":
            raise BadRequest("not a managed ledger name", name=name)
        try:
            local = znode_layout.decode_name(parts[3])
        except UnicodeDecodeError as error:
            raise BadRequest("the topic in a managed ledger name is not UTF-8 once decoded", name=name) from error
        return cls.of(tenant=parts[0], namespace=parts[1], local=local)

    @property
    def full(self) -> str:
        return f"{_PERSISTENT}{self.tenant}/{self.namespace}/{self.local}"

    @property
    def short(self) -> str:
        """`tenant/namespace/local`, the form of the data API's paths."""
        return f"{self.tenant}/{self.namespace}/{self.local}"

    @property
    def partition(self) -> int:
        """Partition index N of `-partition-N`; -1: not a partition."""
        found = _PARTITION.fullmatch(self.local)
        index = int(found["index"]) if found else -1
        return index if index <= _PARTITION_MAX else -1

    @property
    def partitioned_topic(self) -> "TopicName":
        """Topic name without the partition suffix; the name itself if it has none."""
        if self.partition < 0:
            return self
        return TopicName(self.tenant, self.namespace, self.local.rpartition("-partition-")[0])

    def with_partition(self, index: int) -> "TopicName":
        """Return the name of partition `index`. This name must not be a partition."""
        assert self.partition < 0 <= index <= _PARTITION_MAX
        return TopicName.of(tenant=self.tenant, namespace=self.namespace, local=f"{self.local}-partition-{index}")

    @property
    def encoded_local(self) -> str:
        """Local name in the encoding of metadata paths (`encTopic`)."""
        return znode_layout.encode_name(self.local)

    @property
    def managed_ledger_name(self) -> str:
        """`tenant/namespace/persistent/encTopic`."""
        return f"{self.tenant}/{self.namespace}/persistent/{self.encoded_local}"

    @property
    def bundle_position(self) -> int:
        """CRC32 of the full name: the position on the namespace's ring of 2^32 values."""
        return zlib.crc32(self.full.encode())

    def __str__(self) -> str:
        return self.full


def validate_subscription(name: str) -> str:
    """Return `name` if it can name a new subscription: no control character, 1 to SUBSCRIPTION_SIZE_MAX bytes encoded.

    A slash is allowed. Raises BadRequest or TooLarge.
    """
    _check_free_name("subscription", name, SUBSCRIPTION_SIZE_MAX)
    check_new_name("subscription", name)
    return name


def check_new_name(kind: str, name: str) -> None:
    """Raise BadRequest for a control character of any kind or a line separator, before something gets this name."""
    if _CONTROL.search(name):
        raise BadRequest(f"a {kind} name holds no control characters", name=ascii(name))


def _check_free_name(kind: str, name: str, size_max: int) -> None:
    if not name:
        raise BadRequest(f"a {kind} name must not be empty")
    if len(name) > size_max:
        raise TooLarge(f"{kind} name is too long", size=len(name), size_max=size_max)
    if _ASCII_CONTROL.search(name):
        raise BadRequest(f"a {kind} name holds no control characters", name=ascii(name))
    encoded = znode_layout.encode_name(name)
    if len(encoded) > size_max:
        raise TooLarge(f"{kind} name is too long once encoded", size=len(encoded), size_max=size_max)
