"""Control records: their content is read as it was written, and damaged ones are refused."""

import pytest
from bindery_bookie.storage import control_records as control
from bindery_core.errors import DamagedStorage


def test_control_records_unpack_to_their_content() -> None:
    assert control.unpack_sized(control.pack_master_key(1, b"key")) == b"key"
    assert control.unpack_ids(control.pack_fence(9)) == (9, control.FENCE)
    with pytest.raises(DamagedStorage):
        control.unpack_sized(control.pack_master_key(1, b"key")[:-1])
    with pytest.raises(DamagedStorage):
        control.unpack_sized(b"short")
