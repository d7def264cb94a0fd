"""Which bookies there are: how a bookie shows itself, how others see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bindery_core.ids import BookieId

from bindery_metadata.layout import LedgersLayout
from bindery_metadata.store import MetadataStore


class BookieRegistration:
    """Keeps a bookie's ephemeral node in place, through session losses."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        bookie_id: BookieId,
        service_info: bytes = b"",
        *,
        session_timeout_s: float = 10.0,
    ) -> None: ...

    async def register(self, *, read_only: bool = False) -> None:
        """Show the bookie. Waits up to `session_timeout_s` for the node of a former session to go."""
        raise NotImplementedError

    async def set_read_only(self, read_only: bool) -> None:
        """Move between the two lists: the new node is made before the old one goes."""
        raise NotImplementedError

    @property
    def is_registered(self) -> bool:
        """False before register, after a LOST session until the node stands again, after close."""
        raise NotImplementedError

    def on_change(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """`listener(is_registered)` after each change. The result removes it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Take the node away and stop. Idempotent."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BookieRecord:
    bookie_id: BookieId
    host: str
    port: int
    read_only: bool


class BookieDirectory:
    """A cached, watched view of the registered bookies."""

    def __init__(self, store: MetadataStore, layout: LedgersLayout) -> None: ...

    async def start(self) -> None:
        """Read both lists and follow them."""
        raise NotImplementedError

    @property
    def bookies(self) -> Mapping[BookieId, BookieRecord]:
        """The newest snapshot, never changed in place."""
        raise NotImplementedError

    def writable(self) -> frozenset[BookieId]:
        raise NotImplementedError

    def address(self, bookie_id: BookieId) -> tuple[str, int] | None:
        """host, port of a registered bookie; None: not registered, so it must not be contacted."""
        raise NotImplementedError

    def on_change(self, listener: Callable[[Mapping[BookieId, BookieRecord]], None]) -> Callable[[], None]:
        raise NotImplementedError

    async def refresh(self) -> Mapping[BookieId, BookieRecord]:
        """Read both lists now."""
        raise NotImplementedError

    async def wait_for_writable(self, count: int, *, timeout_s: float) -> None:
        """Return once `count` bookies are writable; raises NotEnoughBookies at the timeout."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
