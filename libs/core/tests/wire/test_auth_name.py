"""The name of an authentication plugin is text."""

import pytest
from bindery_core.errors import BadRequest
from bindery_core.wire.auth_name import plugin_name


def test_a_name_is_returned_unchanged() -> None:
    assert plugin_name("TLS") == "TLS"
    assert plugin_name("") == ""


@pytest.mark.parametrize("value", [b"\xff\xfe", b"TLS", None])
def test_a_name_that_protobuf_could_not_decode_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="plugin's name is not UTF-8"):
        plugin_name(value)
