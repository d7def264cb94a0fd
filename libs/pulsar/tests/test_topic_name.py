"""Topic names: valid and invalid ones, and their form in ZooKeeper."""

import zlib

import pytest
from bindery_core.errors import BadRequest, TooLarge
from bindery_pulsar.topic_name import (
    LOCAL_NAME_SIZE_MAX,
    NAME_SIZE_MAX,
    TopicName,
    check_new_name,
    validate_subscription,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("x", "persistent://public/default/x"),
        ("t/n/x", "persistent://t/n/x"),
        ("persistent://t/n/x", "persistent://t/n/x"),
        ("persistent://t-1/n.s:=_/mit Leer zeichen", "persistent://t-1/n.s:=_/mit Leer zeichen"),
    ],
)
def test_short_and_full_forms_are_parsed(text: str, full: str) -> None:
    name = TopicName.parse(text)
    assert name.full == str(name) == full
    assert TopicName.parse(name.full) == name
    assert TopicName.parse(name.short) == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("non-persistent://t/n/x", "non-persistent topics are not supported"),
        ("http://t/n/x", "unknown topic domain"),
        ("n/x", "tenant/namespace/topic"),
        ("t/c/n/x", "tenant/namespace/topic"),
        ("persistent://x", "tenant/namespace/topic"),
        ("", "must not be empty"),
        ("t/n/", "must not be empty"),
        ("/n/x", "not a tenant name"),
        ("t//x", "not a namespace name"),
        ("t ü/n/x", "not a tenant name"),
        ("../n/x", "not a tenant name"),
        ("t/../x", "not a namespace name"),
        ("t/n/..", "path"),
        ("t/n/a\x00b", "control"),
        ("t/n/a\nb", "control"),
        ("t/n/\ud800", "incomplete character"),
    ],
)
def test_an_invalid_name_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        TopicName.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "x" * (LOCAL_NAME_SIZE_MAX + 1),
        "ü" * (LOCAL_NAME_SIZE_MAX // 6 + 1),  # six bytes each once encoded
        "t" * (NAME_SIZE_MAX + 1) + "/n/x",
        "x" * 10_000_000,
    ],
)
def test_lengths_are_limited(text: str) -> None:
    with pytest.raises(TooLarge, match="size_max="):
        TopicName.parse(text)
    assert TopicName.parse("x" * LOCAL_NAME_SIZE_MAX).local


@pytest.mark.parametrize(
    ("local", "partition", "base"),
    [
        ("x-partition-0", 0, "x"),
        ("x-partition-12", 12, "x"),
        ("x-partition-1-partition-2", 2, "x-partition-1"),
        ("x", -1, "x"),
        ("x-partition-", -1, "x-partition-"),
        ("x-partition-01", -1, "x-partition-01"),
        ("x-partition--1", -1, "x-partition--1"),
        ("x-partition-4294967296", -1, "x-partition-4294967296"),
        ("-partition-1", -1, "-partition-1"),
    ],
)
def test_the_partition_is_parsed_from_the_suffix(local: str, partition: int, base: str) -> None:
    name = TopicName.parse(local)
    assert name.partition == partition
    assert name.partitioned_topic.local == base
    if partition >= 0:
        assert name.partitioned_topic.partition == -1 or base.endswith("-partition-1")
    elif "partition" not in local:
        assert name.with_partition(3).partition == 3


def test_names_in_metadata_are_form_encoded() -> None:
    name = TopicName.parse("t/n/a b+ü~*:1")
    assert name.encoded_local == "a+b%2B%C3%BC%7E*%3A1"
    assert name.managed_ledger_name == "t/n/persistent/a+b%2B%C3%BC%7E*%3A1"
    assert TopicName.from_managed_ledger_name(name.managed_ledger_name) == name
    with pytest.raises(BadRequest):
        TopicName.from_managed_ledger_name("t/n/x")


@pytest.mark.parametrize("part", ["%FF", "a%C3", "%ED%A0%80"])
def test_a_managed_ledger_name_that_is_not_utf_8_is_a_bad_request(part: str) -> None:
    with pytest.raises(BadRequest, match="not UTF-8"):
        TopicName.from_managed_ledger_name(f"t/n/persistent/{part}")


def test_the_position_on_the_ring_is_the_crc32_of_the_full_name() -> None:
    assert (
        TopicName.parse("my-topic").bundle_position == zlib.crc32(b"persistent://public/default/my-topic") == 0x2BAD45F7
    )


@pytest.mark.parametrize("character", ["\x00", "\n", "\x1f", "\x7f", "\x80", "\x85", "\x9f", "\u2028", "\u2029"])
def test_new_names_have_no_control_characters_and_line_separators(character: str) -> None:
    for name in (f"{character}a", f"a{character}", f"a{character}b"):
        with pytest.raises(BadRequest, match="no control characters"):
            check_new_name("topic", name)
        with pytest.raises(BadRequest, match="no control characters"):
            validate_subscription(name)
    check_new_name("topic", "a b ü \u200b \u202e")


@pytest.mark.parametrize("name", ["\x80", "a\x85b", "\u2028"])
def test_topics_that_a_pulsar_client_created_with_such_names_are_found(name: str) -> None:
    stored = TopicName("t", "n", name).managed_ledger_name
    assert TopicName.from_managed_ledger_name(stored).local == name


def test_subscription_names_are_validated() -> None:
    assert validate_subscription("a/b ü") == "a/b ü"
    for wrong in ("", "a\x01", ".."):
        with pytest.raises(BadRequest):
            validate_subscription(wrong)
    with pytest.raises(TooLarge):
        validate_subscription("/" * 86)


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=40))
def test_any_text_is_a_valid_name_or_a_bad_request(text: str) -> None:
    try:
        name = TopicName.parse(text)
    except BadRequest:
        return
    assert TopicName.parse(name.full) == name
    assert TopicName.from_managed_ledger_name(name.managed_ledger_name) == name
