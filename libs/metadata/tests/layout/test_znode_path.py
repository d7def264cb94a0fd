"""Paths of znodes: which are valid, and their parts."""

import pytest
from bindery_core.errors import BadRequest, TooLarge
from bindery_metadata.layout.znode_path import (
    DATA_SIZE_MAX,
    PATH_SIZE_MAX,
    ancestors,
    name_of,
    parent_of,
    validate_path,
    validate_size,
)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/a",
        "/a/b/c",
        "/...",
        "/.a",
        "/a b",
        "/ ",
        "/~",
        "/\u00a0",
        "/\ud7ff",
        "/\uf900",
        "/\uffef",
        "/" + "x" * 4095,
    ],
    ids=ascii,
)
def test_a_valid_path_is_returned(path: str) -> None:
    assert validate_path(path) == path


@pytest.mark.parametrize("path", ["", "a", "a/b", "/a/", "//", "/" + "x" * 4096], ids=lambda path: path[:9])
def test_a_path_is_absolute_and_of_limited_length(path: str) -> None:
    with pytest.raises(BadRequest, match="not a znode path") as caught:
        validate_path(path)
    assert caught.value.facts == {"path": path[:200]}


@pytest.mark.parametrize("path", ["/a//b", "//a", "/.", "/..", "/a/./b", "/a/../b"])
def test_a_path_has_no_empty_or_relative_part(path: str) -> None:
    with pytest.raises(BadRequest, match="not a znode path") as caught:
        validate_path(path)
    assert caught.value.facts == {"path": path}


@pytest.mark.parametrize(
    "character",
    [
        "\x00",
        "\x1f",
        "\n",
        "\x7f",
        "\x80",
        "\x9f",
        "\ud800",
        chr(0xDFFF),
        "\ue000",
        "\uf8ff",
        "\ufff0",
        "\uffff",
        "\U0001f600",
    ],
    ids=ascii,
)
def test_some_characters_are_invalid(character: str) -> None:
    with pytest.raises(BadRequest, match="a character that znode paths cannot hold") as caught:
        validate_path(f"/a{character}b")
    assert caught.value.facts == {"path": ascii(f"/a{character}b")}


def test_the_size_of_a_request_is_limited() -> None:
    assert (DATA_SIZE_MAX, PATH_SIZE_MAX) == (1_000_000, 4_096)
    validate_size(1_000_000, "/a")
    with pytest.raises(TooLarge, match="too much data for a znode") as caught:
        validate_size(1_000_001, "/a")
    assert caught.value.facts == {"path": "/a", "size": 1_000_001, "size_max": 1_000_000}


@pytest.mark.parametrize(
    ("path", "parent", "name", "above"),
    [("/a", "/", "a", []), ("/a/b", "/a", "b", ["/a"]), ("/a/b/c", "/a/b", "c", ["/a", "/a/b"])],
)
def test_a_path_has_a_parent_a_name_and_ancestors(path: str, parent: str, name: str, above: list[str]) -> None:
    assert parent_of(path) == parent
    assert name_of(path) == name
    assert list(ancestors(path)) == above


def test_the_root_is_its_own_parent() -> None:
    assert parent_of("/") == "/"
    assert list(ancestors("/")) == []
