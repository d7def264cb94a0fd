"""Access lists: their forms, and credentials in files."""

import pytest
from bindery_core.errors import BadRequest
from bindery_metadata.stores.access_lists import (
    ADMIN,
    ALL,
    CREDENTIAL_SIZE_MAX,
    CREDENTIALS_MAX,
    OPEN_LIST,
    READ,
    WRITE,
    AccessList,
    Credential,
    Entry,
    Kind,
    NewNodes,
    kind_of,
    list_of,
    parse_credentials,
)

NEW = Credential("bindery", "new")
OLD = Credential("bindery", "old")
BOTH = (NEW, OLD)
ANYONE_READS = Entry("world", "anyone", READ)


def test_an_identity_is_the_one_that_zookeeper_computes() -> None:
    """The value is that of ZooKeeper's own tests of its superDigest."""
    assert Credential("super", "test").identity == "super:D/InIHSb7yEEbrWz8b9l71RjZJU="


def test_entries_are_shown_as_zookeeper_shows_them() -> None:
    assert str(OPEN_LIST[0]) == "world:anyone:cdrwa"
    assert str(ANYONE_READS) == "world:anyone:r"


def test_passwords_are_not_shown() -> None:
    assert "new" not in repr(NEW)


def test_new_nodes_belong_to_the_first_credentials() -> None:
    own = Entry("digest", NEW.identity, ALL)
    assert list_of(NewNodes.OPEN, ()) == OPEN_LIST
    assert list_of(NewNodes.CREATOR, BOTH) == (own,)
    assert list_of(NewNodes.SHARED, BOTH) == (own, ANYONE_READS)


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        (OPEN_LIST, Kind.OPEN),
        ((*list_of(NewNodes.CREATOR, BOTH), Entry("world", "anyone", WRITE)), Kind.OPEN),
        ((Entry("world", "anyone", READ | ADMIN),), Kind.OPEN),
        (list_of(NewNodes.CREATOR, (NEW,)), Kind.CREATOR),
        (list_of(NewNodes.SHARED, (NEW,)), Kind.SHARED),
        (tuple(reversed(list_of(NewNodes.SHARED, (NEW,)))), Kind.SHARED),
        (list_of(NewNodes.CREATOR, (OLD,)), Kind.PREVIOUS),
        (list_of(NewNodes.SHARED, (OLD,)), Kind.PREVIOUS),
        (list_of(NewNodes.CREATOR, (Credential("other", "x"),)), Kind.OTHER),
        ((*list_of(NewNodes.CREATOR, (NEW,)), Entry("sasl", "bookkeeper", ALL)), Kind.OTHER),
        ((Entry("digest", NEW.identity, READ),), Kind.OTHER),
        ((ANYONE_READS,), Kind.OTHER),
        ((), Kind.OTHER),
    ],
)
def test_lists_are_recognized(entries: AccessList, kind: Kind) -> None:
    assert kind_of(entries, BOTH) is kind


def test_without_credentials_only_open_lists_are_recognized() -> None:
    assert kind_of(OPEN_LIST, ()) is Kind.OPEN
    assert kind_of(list_of(NewNodes.CREATOR, BOTH), ()) is Kind.OTHER


def test_a_file_has_one_credential_per_line() -> None:
    assert parse_credentials(b"bindery:new\n\n  bindery:old  \r\n") == BOTH
    assert parse_credentials("b:p:\u00e4 x".encode()) == (Credential("b", "p:\u00e4 x"),)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n \n", b"secretword", b":secretword", b"secretword:", b"secretword:a\tb", b"secretword:\xff",
        b"u:" + CREDENTIAL_SIZE_MAX * b"s", (CREDENTIALS_MAX + 1) * b"u:secretword\n",
    ],
)  # fmt: skip
def test_unusable_files_are_refused_without_their_content(content: bytes) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_credentials(content)
    assert "secretword" not in str(raised.value)
