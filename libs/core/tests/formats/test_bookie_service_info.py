"""Service info of a bookie, against BookKeeper's bytes."""

import pytest
from bindery_core.errors import Corrupt
from bindery_core.formats import bookie_service_info_pb2 as pb
from bindery_core.formats.bookie_service_info import BookieServiceInfo, Endpoint, decode, encode, of_bookie
from bindery_core.ids import BookieId
from hypothesis import given, settings
from hypothesis import strategies as st

ID = BookieId("10.0.0.1:3181")
GOLDEN = bytes.fromhex("32210a06626f6f6b696510ed181a0831302e302e302e31220a626f6f6b69652d727063")


def test_encoded_service_info_equals_the_bytes_of_bookkeeper() -> None:
    info = of_bookie(host="10.0.0.1", port=3181)
    assert encode(info) == GOLDEN
    assert decode(GOLDEN, bookie_id=ID) == info
    assert info.rpc_address() == ("10.0.0.1", 3181)


def test_the_http_server_is_a_second_endpoint() -> None:
    info = of_bookie(host="h", port=3181, http_port=8000)
    assert decode(encode(info), bookie_id=ID) == info
    assert info.endpoints[1] == Endpoint("httpserver", 8000, "h", "http")


def test_empty_data_means_that_the_id_is_the_address() -> None:
    assert decode(b"", bookie_id=ID).rpc_address() == ("10.0.0.1", 3181)
    for bookie_id in ("bookie-0", "host:port", ":1", "h:70000"):
        with pytest.raises(Corrupt, match=r"not host:port"):
            decode(b"", bookie_id=BookieId(bookie_id))


def test_a_bookie_without_its_rpc_endpoint_has_no_address() -> None:
    assert BookieServiceInfo((Endpoint("httpserver", 1, "h", "http"),)).rpc_address() is None


texts = st.text(max_size=10)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            Endpoint,
            texts,
            st.integers(0, 65535),
            texts,
            texts,
            st.lists(texts, max_size=3).map(tuple),
            st.lists(texts, max_size=3).map(tuple),
        ),
        max_size=3,
    ),
    st.dictionaries(texts, texts, max_size=3),
)
def test_service_info_round_trips(endpoints: list[Endpoint], properties: dict[str, str]) -> None:
    info = BookieServiceInfo(tuple(endpoints), properties)
    data = encode(info)
    if data:
        assert decode(data, bookie_id=ID) == info
        written = pb.BookieServiceInfoFormat.FromString(data).SerializeToString(deterministic=True)
        assert sorted(written) == sorted(data)  # protobuf orders the properties differently
        assert written == data or len(properties) > 1


@pytest.mark.parametrize("data", [b"\x32", b"\x32\x02\x0a\x00", GOLDEN[:-1], b"random"])
def test_invalid_service_info_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data, bookie_id=ID)
