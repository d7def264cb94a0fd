"""Identifiers as types, so that the type checker reports a ledger id that is used as an entry id.

| type     | wire form                  | text form  | range                                |
|----------|----------------------------|------------|--------------------------------------|
| LedgerId | i64                        | decimal    | 0 .. 2^63 - 1                        |
| EntryId  | i64                        | decimal    | 0 .. 2^63 - 1; -1: INVALID_ENTRY_ID  |
| BookieId | UTF-8 in metadata          | as it is   | see `validate_bookie_id`             |

Source: BookKeeper's BookieId and LedgerMetadata.
"""

import re
from typing import Final, NewType

from bindery_core.errors import BadRequest

LedgerId = NewType("LedgerId", int)
EntryId = NewType("EntryId", int)
BookieId = NewType("BookieId", str)

ID_MAX: Final = 2**63 - 1
"""Greatest ledger id and entry id."""
INVALID_ENTRY_ID: Final = EntryId(-1)
"""On the wire: "the last entry" in a request, "none" in a response. In metadata: no last entry is recorded."""

BOOKIE_ID_SIZE_MAX: Final = 255
"""Maximum characters of a bookie id."""
_BOOKIE_ID = re.compile(r"[a-zA-Z0-9:-_.\-]+")


def validate_bookie_id(text: str) -> BookieId:
    """Return `text` as a bookie id.

    The character class contains the range ':'..'_' because BookKeeper's does, so ';<=>?@[\\]^' are legal too.
    Raises BadRequest for an empty or too long id, another character, or the reserved word `readonly`.
    """
    if not _BOOKIE_ID.fullmatch(text) or len(text) > BOOKIE_ID_SIZE_MAX or text == "readonly":
        raise BadRequest("not a bookie id", bookie_id=text)
    return BookieId(text)
