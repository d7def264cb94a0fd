"""The type and the encoding of a body are read from its headers alone; what is not exactly right is refused."""

import pytest
from bindery_core.errors import UnsupportedMediaType
from bindery_kit.admin.content_types import check_codings, check_json_type


@pytest.mark.parametrize(
    "value", [b"application/json", b"APPLICATION/JSON", b" application/json\t; charset=utf-8", b"application/json;"]
)
def test_json_is_recognized_in_any_case_and_with_parameters(value: bytes) -> None:
    check_json_type([(b"host", b"x"), (b"content-type", value)])


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b";application/json"],
        [b"text/plain"],
        [b"text/plain;application/json"],
        [b"text/plain, application/json"],
        [b"application/json, text/plain"],
        [b"application/json text/plain"],
        [b"application/jsonx"],
        [b"application/x+json"],
        [b"application/json", b"text/plain"],
        [b"text/plain", b"application/json"],
        [b"application/json", b"application/json"],
        [b"multipart/form-data; boundary=application/json"],
        [b"application/x-www-form-urlencoded"],
    ],
)
def test_another_type_several_types_or_none_are_refused_with_the_fix(values: list[bytes]) -> None:
    with pytest.raises(UnsupportedMediaType, match="send it with -H 'Content-Type: application/json'") as caught:
        check_json_type([(b"content-type", value) for value in values])
    assert caught.value.facts == {"content_type": b", ".join(values).decode() or "none"}


def test_the_error_shows_the_beginning_of_a_long_type() -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        check_json_type([(b"content-type", b"\xe9" * 10_000)])
    assert caught.value.facts == {"content_type": "é" * 100}


@pytest.mark.parametrize(
    "header",
    [
        (b"content-encoding", b"identity"),
        (b"content-encoding", b"Identity , identity"),
        (b"content-encoding", b""),
        (b"transfer-encoding", b"chunked"),
        (b"transfer-encoding", b" Chunked"),
    ],
)
def test_a_body_that_is_not_encoded_passes(header: tuple[bytes, bytes]) -> None:
    check_codings([(b"host", b"x"), header])


@pytest.mark.parametrize("value", [b"gzip", b"GZIP", b"br", b"identity, gzip", b"gzip,", b"identity;q=1", b"none"])
def test_an_encoded_body_is_refused_with_the_fix(value: bytes) -> None:
    for headers in ([], [(b"content-encoding", b"identity")]):
        with pytest.raises(UnsupportedMediaType, match="send the body without Content-Encoding") as caught:
            check_codings([*headers, (b"content-encoding", value)])
        assert caught.value.facts == {"content_encoding": value.decode()}


@pytest.mark.parametrize("value", [b"gzip, chunked", b"gzip", b"chunked, chunked", b""])
def test_a_transfer_encoding_that_is_not_decoded_is_refused(value: bytes) -> None:
    with pytest.raises(UnsupportedMediaType, match="only chunked"):
        check_codings([(b"transfer-encoding", value)])
