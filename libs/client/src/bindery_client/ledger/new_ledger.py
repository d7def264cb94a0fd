"""NewLedger: the options of `create` and their defaults, for every implementation of `api.LedgerClient`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from bindery_core.errors import BadRequest
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId


class LedgerOptions(TypedDict, total=False):
    """Keyword arguments of `create`; the fields of NewLedger."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest_type: DigestType
    password: bytes
    custom: Mapping[str, bytes] | None
    deferred_sync: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLedger:
    """A ledger to be created. Raises BadRequest for impossible quorums."""

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    digest_type: DigestType = DigestType.CRC32C
    password: bytes = field(default=b"", repr=False)
    custom: Mapping[str, bytes] | None = None
    deferred_sync: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size:
            raise BadRequest(
                "quorums must satisfy 1 <= ack_quorum <= write_quorum <= ensemble_size",
                ensemble_size=self.ensemble_size,
                write_quorum=self.write_quorum,
                ack_quorum=self.ack_quorum,
            )

    def metadata(self, ensemble: tuple[BookieId, ...]) -> LedgerMetadata:
        """Return the metadata of the ledger before its first entry."""
        return LedgerMetadata(
            ensemble_size=self.ensemble_size,
            write_quorum=self.write_quorum,
            ack_quorum=self.ack_quorum,
            segments=(Segment(EntryId(0), ensemble),),
            digest_type=self.digest_type,
            password=self.password,
            custom=dict(self.custom or {}),
        )
