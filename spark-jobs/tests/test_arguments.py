"""Values of the command line: durations, ranges of ledgers and levels."""

import pytest
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX
from bindery_spark.arguments import EXIT_INTERRUPTED, bytes_of, duration_ms, ledger_range, level_of


@pytest.mark.parametrize(
    ("text", "ms"), [("90s", 90_000), ("1h30m", 5_400_000), ("7d", 604_800_000), ("0s", 0), ("1m1h1m", 3_720_000)]
)
def test_a_duration_is_converted_to_ms(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "ids"),
    [("7", (7, 7)), ("7-20", (7, 20)), ("7-7", (7, 7)), ("0-", (0, ID_MAX)), (f"0-{ID_MAX}", (0, ID_MAX))],
)
def test_a_range_is_converted_to_its_first_and_last_id(text: str, ids: tuple[int, int]) -> None:
    assert ledger_range(text) == ids


@pytest.mark.parametrize("text", ["", "9-7", "a-b", "-3", "1-99999999999999999999"])
def test_an_invalid_range_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest):
        ledger_range(text)


@pytest.mark.parametrize("text", ["", "7", "soon", "1y", "-1s"])
def test_an_invalid_duration_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(BadRequest, match="7d"):
        duration_ms(text)


def test_an_unknown_level_is_rejected_with_the_valid_ones() -> None:
    assert level_of("deep") == "deep"
    with pytest.raises(BadRequest, match="quick, standard, deep"):
        level_of("full")


@pytest.mark.parametrize(
    ("text", "size"),
    [("", None), ("1", 1), ("512", 512), ("7B", 7), ("3KiB", 3_072), ("2MiB", 2_097_152), ("2GiB", 2_147_483_648)],
)
def test_a_size_is_converted_to_bytes(text: str, size: int | None) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["0", "0KiB", "many", "-1", "1.5MiB"])
def test_an_invalid_size_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(BadRequest, match="64MiB"):
        bytes_of(text)


def test_the_exit_code_of_an_interruption_is_that_of_shells() -> None:
    assert EXIT_INTERRUPTED == 130
