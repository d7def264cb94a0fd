"""ZooKeeperStore: the metadata store over kazoo. The only module that imports kazoo."""

from typing import Final

from bindery_metadata.store import MetadataStore

SESSION_TIMEOUT_S: Final = 10.0
OPERATION_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 15.0


class ZooKeeperStore(MetadataStore):
    @classmethod
    async def connect(
        cls,
        hosts: str,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        operation_timeout_s: float = OPERATION_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> "ZooKeeperStore":
        """Connect to `hosts` ("a:2181,b:2181"). Raises MetadataUnavailable naming them when nobody answers in time."""
        raise NotImplementedError
