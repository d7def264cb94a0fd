"""Numbers, sizes and durations in sentences, and the sentence about a bookie that cannot be replaced."""

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent, Membership
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records import sentences

B = [BookieId(f"b{number}") for number in range(6)]


@pytest.mark.parametrize(("bookies", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")])
def test_bookies_are_listed_as_in_a_sentence(bookies: list[str], text: str) -> None:
    assert sentences.listed(bookies) == text


@pytest.mark.parametrize(
    ("count", "plural", "text"),
    [
        (0, "", "0 ledgers"),
        (1, "", "1 ledger"),
        (2, "", "2 ledgers"),
        (1200, "", "1,200 ledgers"),
        (1, "ledgers in all", "1 ledger"),
        (2, "ledgers in all", "2 ledgers in all"),
    ],
)
def test_only_one_is_singular(count: int, plural: str, text: str) -> None:
    assert sentences.counted(count, "ledger", plural) == text


@pytest.mark.parametrize(
    ("bytes_count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (1024**3, "1.0 GiB"),
        (1024**4 - 1, "1024.0 GiB"),
        (1024**4, "1.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_it_reaches(bytes_count: int, text: str) -> None:
    assert sentences.size(bytes_count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1 s"),
        (1.6, "2 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172_799, "48 h"),
        (172_800, "2 days"),
        (864_000, "10 days"),
    ],
)
def test_a_duration_has_a_unit_of_which_there_are_at_least_two(seconds: float, text: str) -> None:
    assert sentences.span(seconds) == text


def test_a_maintenance_without_an_end_names_no_time() -> None:
    assert sentences.in_maintenance(B[0], 1000, None).startswith("b0 is in maintenance: ")
    assert sentences.in_maintenance(B[0], 1000, 61_000).startswith("b0 is in maintenance for another 60 s: ")


def test_a_hole_names_the_bookies_if_they_are_known() -> None:
    assert "without some copies: " in sentences.open_with_hole(7, [])
    assert "without some copies on b1 and b2: " in sentences.open_with_hole(7, B[1:3])


def test_each_bookie_outside_the_ensemble_that_cannot_replace_another_has_its_reason() -> None:
    view = ClusterView(
        bookies={B[0]: True, B[1]: False, B[2]: False, B[3]: True, B[4]: True},
        memberships={b: Membership(b, Intent.DRAINING) for b in (B[1], B[3], B[5])},
    )
    text = sentences.no_spare(B[0], (B[0], B[1]), view, refused={B[4]: "is full"})
    assert text == (
        "no bookie can replace b0: none of 3 writable bookies can accept copies of this ledger"
        " (b2 is read-only; b3 is draining; b4 is full); add a bookie, or start b0 again"
    )


def test_without_other_bookies_no_reason_is_given() -> None:
    view = ClusterView(bookies={B[0]: True}, memberships={})
    closed = sentences.no_spare(B[0], (B[0],), view)
    assert closed.endswith(
        "none of 1 writable bookie can accept copies of this ledger; add a bookie, or start b0 again"
    )
    assert "the ledger stays open" in sentences.no_spare(B[0], (B[0],), view, is_open=True)
