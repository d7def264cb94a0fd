"""The size limit of a topic's entries."""

from typing import Final

from bindery_core.entry import PAYLOAD_SIZE_MAX

ENTRY_SIZE_MAX: Final = 5 * 2**20 - 10 * 2**10
"""Maximum bytes of an entry. An entry and its request fit a bookie's frame of 5 MiB; Pulsar also reserves 10 KiB."""

assert ENTRY_SIZE_MAX <= PAYLOAD_SIZE_MAX
