"""Cookies: BookKeeper's text, older layouts, and the description of differences."""

import pytest
from bindery_core.errors import BadRequest, BadVersion, Corrupt
from bindery_core.formats import cookie_pb2 as pb
from bindery_core.formats.cookie import Cookie, Difference, describe, differences, parse
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

COOKIE = Cookie(
    bookie_id="10.0.0.1:3181",
    journal_dirs=("/data/journal",),
    ledger_dirs=("/data/ledger0", "/data/ledger1"),
    instance_id="2bd21a1c-7bd2-4fa5-a6b9-aa6cdd6ac4b3",
)
GOLDEN = b"""\
5
bookieHost: "10.0.0.1:3181"
journalDir: "/data/journal"
ledgerDirs: "2\\t/data/ledger0\\t/data/ledger1"
instanceId: "2bd21a1c-7bd2-4fa5-a6b9-aa6cdd6ac4b3"
"""


def test_the_text_equals_the_text_of_bookkeeper() -> None:
    assert COOKIE.text() == GOLDEN
    assert parse(GOLDEN) == COOKIE


def test_index_directories_are_a_fifth_field() -> None:
    cookie = Cookie(bookie_id="b", journal_dirs=("/j",), ledger_dirs=("/l",), index_dirs=("/i",))
    assert cookie.text().endswith(b'indexDirs: "1\\t/i"\n')
    assert parse(cookie.text()) == cookie


def test_older_layouts_are_read() -> None:
    assert parse(b"4" + GOLDEN[1:]) == COOKIE
    assert parse(b"3\nb:1\n/j\n1\t/l\n") == Cookie(bookie_id="b:1", journal_dirs=("/j",), ledger_dirs=("/l",))


@pytest.mark.parametrize(("layout", "reason"), [(2, "too old"), (1, "too old"), (6, "not understood")])
def test_an_unsupported_layout_is_reported(layout: int, reason: str) -> None:
    with pytest.raises(BadVersion, match=f"{reason}: layout={layout}"):
        parse(b"%d\nanything" % layout)


@pytest.mark.parametrize(
    "text",
    [b"", b"junk", b"\xff\xfe", b"5\n", b'5\nbookieHost: "b"\n', b"5\n{", b"3\nb\n/j\n", b"3\nb\n/j\n2\t/l\n"],
)
def test_an_invalid_cookie_is_corrupt(text: bytes) -> None:
    with pytest.raises(Corrupt, match="not a cookie"):
        parse(text)


names = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\t\n,\r"), min_size=1, max_size=10)
dirs = st.lists(names, min_size=1, max_size=3).map(tuple)


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        Cookie,
        bookie_id=names,
        journal_dirs=dirs,
        ledger_dirs=dirs,
        index_dirs=st.none() | dirs,
        instance_id=st.none() | names,
    )
)
def test_cookies_round_trip_and_equal_themselves(cookie: Cookie) -> None:
    assert parse(cookie.text()) == cookie
    assert differences(cookie, parse(cookie.text())) == []


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Cookie,
        bookie_id=names,
        journal_dirs=dirs,
        ledger_dirs=dirs,
        index_dirs=st.none() | dirs,
        instance_id=st.none() | st.text(st.characters(blacklist_categories=["Cs"]), max_size=10),
    )
)
def test_the_text_is_the_one_that_protobuf_writes(cookie: Cookie) -> None:
    message = pb.CookieFormat()
    text = cookie.text()
    text_format.Parse(text.decode().removeprefix("5\n"), message)
    assert message.bookieHost == cookie.bookie_id
    assert text == f"5\n{text_format.MessageToString(message, as_utf8=False)}".encode()


@pytest.mark.parametrize(
    "rest",
    [
        b'bookieHost: "b" journalDir: "/j" ledgerDirs: "1\\t/l"',
        b"bookieHost: 'b'\njournalDir: '/j'\nledgerDirs: '1\\t/l'\n",
        b'# by hand\n\n  bookieHost : "b"\r\n  journalDir: "/"\n  "j"\n  ledgerDirs: "1\\x09/l"\n',
        b'bookieHost: "b"\nlater: 7\njournalDir: "/j"\nledgerDirs: "1\\t/l"\n',
        b'bookieHost: "b"\nledgerDirs: "1\\t\\057\\154"\njournalDir: "/j"',
    ],
)
def test_any_form_of_protobufs_text_is_read(rest: bytes) -> None:
    assert parse(b"5\n" + rest) == Cookie(bookie_id="b", journal_dirs=("/j",), ledger_dirs=("/l",))


@pytest.mark.parametrize(
    "rest",
    [
        b'bookieHost: "a"\nbookieHost: "b"\njournalDir: "/j"\nledgerDirs: "1\\t/l"\n',
        b'bookieHost: "\\377"\njournalDir: "/j"\nledgerDirs: "1\\t/l"\n',
        b'bookieHost: "b"\njournalDir: "/j"\nledgerDirs: "1\\t/l\n',
    ],
)
def test_text_that_protobuf_rejects_is_corrupt(rest: bytes) -> None:
    with pytest.raises(Corrupt, match="not a cookie"):
        parse(b"5\n" + rest)


@pytest.mark.parametrize("directory", ["", "a\tb", "a\nb", "a,b"])
def test_directories_that_the_text_cannot_hold_are_refused(directory: str) -> None:
    with pytest.raises(BadRequest):
        Cookie(bookie_id="b", journal_dirs=(directory,), ledger_dirs=("/l",)).text()


def test_every_field_that_differs_is_listed() -> None:
    found = Cookie(bookie_id="x", journal_dirs=("/x",), ledger_dirs=("/y",), index_dirs=("/z",))
    assert [d.field for d in differences(COOKIE, found)] == [
        "bookie id",
        "journal directories",
        "ledger directories",
        "index directories",
        "instance id",
    ]


def test_index_directories_default_to_the_ledger_directories() -> None:
    named = Cookie(bookie_id="b", journal_dirs=("/j",), ledger_dirs=("/l",), index_dirs=("/l",))
    assert differences(Cookie(bookie_id="b", journal_dirs=("/j",), ledger_dirs=("/l",)), named) == []


def test_differences_are_shown_side_by_side() -> None:
    text = describe([Difference("bookie id", "b-0", "b-1"), Difference("instance id", "aaaa", "(none)")])
    assert text == "field        expected  found\nbookie id    b-0       b-1\ninstance id  aaaa      (none)"
