"""Decode entries within a limit: small ones at once, large ones in a thread, so that the event loop goes on.

An entry of a few kilobytes can decompress to many megabytes, or to very many messages. LARGE_MAX limits how many of
these are decoded at a time, and thus the memory that they take.
"""

import asyncio
from typing import Final

from bindery_pulsar.message_codec import Message, PackedEntry

DECODED_BYTES_MAX: Final = 16 * 2**20
"""Default maximum bytes of a decoded entry."""
LARGE_MAX: Final = 2
"""Maximum number of large entries that are decoded at a time."""


class EntryDecoder:
    """Shared by the topics of a broker. `size_max`: maximum bytes of a decoded entry (`PackedEntry.decode`)."""

    def __init__(self, *, size_max: int = DECODED_BYTES_MAX) -> None:
        self.size_max = size_max
        self._large = asyncio.Semaphore(LARGE_MAX)

    def decode_small(self, entry: bytes) -> "list[Message] | PackedEntry":
        """Return the messages of a small entry; a large one is returned for `decode_large`."""
        packed = PackedEntry(entry)
        return packed.decode(size_max=self.size_max) if packed.is_small else packed

    async def decode(self, entry: bytes) -> list[Message]:
        """Return the messages of an entry. Other tasks run meanwhile only if it is large."""
        found = self.decode_small(entry)
        return found if isinstance(found, list) else await self.decode_large(found)

    async def decode_large(self, entry: PackedEntry) -> list[Message]:
        async with self._large:
            return await asyncio.to_thread(entry.decode, size_max=self.size_max)
