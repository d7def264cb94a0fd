"""Paths are matched while they are percent-encoded; each segment is decoded by itself."""

import pytest
from bindery_broker.http.paths import SEGMENT_SIZE_MAX, SegmentConvertor, route_path, topic_of
from bindery_core.errors import BadRequest, TooLarge
from starlette.routing import compile_path


@pytest.mark.parametrize(
    ("raw_path", "path"),
    [
        (b"/v1/topics", "/v1/topics"),
        (b"/v1/topics//", "/v1/topics"),
        (b"", "/"),
        (b"/a//b", "/a//b"),
        (b"/a%2Fb/c%20d", "/a%2Fb/c%20d"),
        (b"/\xc3\xa9/%c3%a9", "/é/%c3%a9"),
        (b"/.../.a/a./%2e%2e%2e/%2F", "/.../.a/a./%2e%2e%2e/%2F"),
    ],
    ids=ascii,
)
def test_the_path_to_match_is_encoded_and_has_no_trailing_slashes(raw_path: bytes, path: str) -> None:
    assert route_path(raw_path) == path


@pytest.mark.parametrize(
    ("raw_path", "part"),
    [
        (b"/a/./b", "."),
        (b"/a/../b", ".."),
        (b"/a/..", ".."),
        (b"/a/%2e", "%2e"),
        (b"/a/%2E%2e/b", "%2E%2e"),
        (b"/a/.%2e", ".%2e"),
        (b"/%2e./b", "%2e."),
    ],
)
def test_dots_that_others_would_resolve_are_refused(raw_path: bytes, part: str) -> None:
    with pytest.raises(BadRequest) as caught:
        route_path(raw_path)
    assert caught.value.facts == {"part": part}


def test_a_path_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(BadRequest, match="not UTF-8"):
        route_path(b"/a/\xff")


@pytest.mark.parametrize(
    ("segment", "text"), [("a", "a"), ("", ""), ("a%2Fb%20c", "a/b c"), ("%C3%A9é", "éé"), ("%zz%", "%zz%")]
)
def test_a_segment_is_decoded(segment: str, text: str) -> None:
    assert SegmentConvertor().convert(segment) == text


def test_a_segment_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(BadRequest, match="not UTF-8"):
        SegmentConvertor().convert("a%FF")


def test_the_size_of_a_segment_is_limited() -> None:
    assert SEGMENT_SIZE_MAX == 4_096
    assert SegmentConvertor().convert("x" * 4_096) == "x" * 4_096
    with pytest.raises(BadRequest) as caught:
        SegmentConvertor().convert("x" * 4_097)
    assert caught.value.facts == {"size": 4_097, "size_max": 4_096}


def test_routes_match_segments_even_if_they_are_empty() -> None:
    pattern, _, convertors = compile_path("/a/{b:segment}/c")
    assert isinstance(convertors["b"], SegmentConvertor)
    for path, segment in (("/a/x%2Fy/c", "x%2Fy"), ("/a//c", "")):
        found = pattern.match(path)
        assert found is not None
        assert found["b"] == segment
    assert pattern.match("/a/x/y/c") is None


def test_paths_are_not_made_from_routes() -> None:
    with pytest.raises(NotImplementedError):
        SegmentConvertor().to_string("a")


def test_topic_names_are_validated_and_cached() -> None:
    name = topic_of("t", "n", "a:b")
    assert name.short == "t/n/a:b"
    assert topic_of("t", "n", "a:b") is name
    assert topic_of.cache_info().maxsize == 4_096
    with pytest.raises(BadRequest):
        topic_of("t", "n", "")
    with pytest.raises(TooLarge):
        topic_of("t", "n", "x" * 256)
