"""The size limit of a topic's entries."""

from typing import Final

from bindery_core.entry import PAYLOAD_SIZE_MAX

ENTRY_SIZE_MAX: Final = 5 * 2**20 - 10 * 2**10
"""Bytes: fits a bookie's frame of 5 MiB with room for the request. Pulsar leaves 10 KiB for the same reason."""

assert ENTRY_SIZE_MAX <= PAYLOAD_SIZE_MAX
