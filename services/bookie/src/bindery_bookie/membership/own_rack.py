"""OwnRack: write the rack of this bookie to the record in `/bookies`, by compare-and-set.

Only the entry of this bookie changes. Its group, and the entries of other bookies, stay as Pulsar's tools or operators
have set them. A rack that cannot be written is logged and noted in the health report, and does not fail the start: the
bookie serves, and clients take it for one without a rack.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from bindery_core.errors import BinderyError, MetadataOutcomeUnknown, MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.late_imports import in_thread
from bindery_metadata.stores.store import MetadataStore

if TYPE_CHECKING:
    from bindery_metadata.bookies.racks import RackStore

FILE_SIZE_MAX: Final = 4096
"""Maximum number of bytes of a file with a rack that are read."""
_NOTE: Final = "rack"

log = get_logger(__name__)


class OwnRack:
    """`rack` or `file`: the settings of these names; both empty: nothing is written."""

    def __init__(self, rack: str, file: str, *, host: str, health: Health) -> None:
        """`host`: the host name of this bookie, for the record."""
        self._rack = rack
        self._file = file
        self._host = host
        self._health = health

    async def announce(self, metadata: MetadataStore, bookie_id: BookieId) -> None:
        """Write the rack. Raises MetadataUnavailable and MetadataOutcomeUnknown; may be repeated."""
        self._health.note(_NOTE, None)
        rack = self._rack or self._from_file()
        if not rack:
            return
        store = await in_thread(_import_rack_store)
        try:
            is_new = await store(metadata).set_rack(bookie_id, rack, hostname=self._host)
        except (MetadataUnavailable, MetadataOutcomeUnknown):
            raise
        except BinderyError as error:
            self._health.note(_NOTE, f"rack {rack} is not announced: {error}")
            log.error("rack_not_announced", rack=rack, **error_fields(error))
            return
        log.info("rack_announced", rack=rack, changed=is_new)

    def _from_file(self) -> str:
        if not self._file:
            return ""
        try:
            with Path(self._file).open("rb") as file:
                rack = file.read(FILE_SIZE_MAX).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            rack, reason = "", str(error)
        else:
            reason = "the file is empty"
        if not rack:
            self._health.note(_NOTE, f"no rack in {self._file}: {reason}")
            log.warning("rack_unknown", file=self._file, reason=reason)
        return rack


def _import_rack_store() -> "type[RackStore]":
    from bindery_metadata.bookies.racks import RackStore  # its parser takes long to import

    return RackStore
