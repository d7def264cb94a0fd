"""The size limit of a topic's entries."""

from bindery_core.entry import PAYLOAD_SIZE_MAX
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX


def test_an_entry_has_at_most_five_mebibytes_less_ten_kibibytes() -> None:
    assert ENTRY_SIZE_MAX == 5_232_640


def test_an_entry_of_a_topic_fits_an_entry_of_a_ledger() -> None:
    assert ENTRY_SIZE_MAX <= PAYLOAD_SIZE_MAX
