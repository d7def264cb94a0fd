"""Decode entries within a limit: small ones at once, large ones in a thread, so that the event loop goes on.

An entry of a few kilobytes can decompress to many megabytes, or to very many messages. LARGE_MAX limits how many of
these are decoded at a time, and readers tell for how many bytes they have room: an entry that takes more is decoded
once they have it. Of a batch, readers decode the part that they need. An entry that takes more than the limit by its
metadata is not decoded, nor are encrypted entries and chunks: each is one message with its payload as stored
(`PackedEntry.is_opaque`), so that it does not hold up those that follow. An entry is refused if it is damaged, or if
only its decoded messages show that it exceeds the limit, by their properties.
"""

import asyncio
from typing import Final

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import METADATA_READ_SIZE_MAX, Message, PackedEntry, UnreadableMessage

DECODED_BYTES_MAX: Final = 16 * 2**20
"""Default maximum bytes of a decoded entry."""
LARGE_MAX: Final = 2
"""Maximum number of large entries that are decoded at a time."""


class RoomNeeded(Exception):
    """An entry does not fit into the room of its reader; `size` bytes are enough for it."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes are needed to decode an entry")
        self.size = size


class EntryDecoder:
    """Shared by the topics of a broker. `size_max`: maximum bytes of a decoded entry; a larger one is not decoded."""

    def __init__(self, *, size_max: int = DECODED_BYTES_MAX) -> None:
        self.size_max = size_max
        self._large = asyncio.Semaphore(LARGE_MAX)

    def open(self, entry: bytes) -> PackedEntry:
        """Return an entry for `decode`. Raises CorruptMessage, or UnreadableMessage if its metadata is too large."""
        return PackedEntry(entry, metadata_size_max=METADATA_READ_SIZE_MAX, size_max=self.size_max)

    def decode_small(self, entry: PackedEntry, *, first: int = 0, count_max: int | None = None) -> list[Message]:
        """Return what `decode` returns for a small entry."""
        return entry.decode(size_max=self.size_max, first=first, count_max=count_max)

    async def decode(
        self, entry: PackedEntry, *, room: int, first: int = 0, count_max: int | None = None
    ) -> list[Message]:
        """Return the messages of an entry. Other tasks run meanwhile only if it is large.

        `first` and `count_max`: the part of a batch to return, as in `PackedEntry.decode`. `room`: the bytes that the
        part may take once it is decoded, unless the entry is small. Raises RoomNeeded if it takes more.
        """
        if entry.is_small:
            return self.decode_small(entry, first=first, count_max=count_max)
        size = entry.claimed_size(count_max)
        if size > room:
            raise RoomNeeded(size)
        async with self._large:
            found = await asyncio.to_thread(_decode, entry, min(room, self.size_max), first, count_max)
        if isinstance(found, UnreadableMessage) and room < self.size_max:
            raise RoomNeeded(self.size_max)
        if isinstance(found, BinderyError):
            raise found
        return found


def _decode(entry: PackedEntry, size_max: int, first: int, count_max: int | None) -> list[Message] | BinderyError:
    """Return the messages, or the error without its traceback.

    A future and the error that it raises refer to each other: the decompressed bytes in the frames of a traceback would
    stay in memory until the next collection of garbage.
    """
    try:
        return entry.decode(size_max=size_max, first=first, count_max=count_max)
    except BinderyError as error:
        return error.with_traceback(None)
