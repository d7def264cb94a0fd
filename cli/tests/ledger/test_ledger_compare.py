"""`bindery ledger compare` on ledgers in memory, intact and damaged."""

import pytest
from bindery.ledger import replicas
from bindery_core.errors import BadRequest
from bindery_core.ids import BookieId
from fake_replicas import FakeReplicas
from ledger_runs import damaged, lines, run


@pytest.fixture(autouse=True)
def no_second_look_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RECHECK_PAUSE_S", 0.0)


def test_compare_of_a_good_ledger_prints_a_row_for_each_entry_and_exits_with_0() -> None:
    result = run(FakeReplicas([b"zero", b"one"]), "compare")
    assert result.exit_code == 0
    heading, first, second, *summary = result.stdout.splitlines()
    assert heading.split() == ["entry", "b0", "b1", "b2", "verdict"]
    assert first.split()[:1] + first.split()[-1:] == ["0", "agree"]
    assert second.count("lac=0 len=1000000") == 3
    assert summary[0] == "ledger 7 (closed) agrees: 2 entries from 0 to 1: 2 agree"
    assert summary[1:] == ["  b0: 2 good", "  b1: 2 good", "  b2: 2 good"]


def test_compare_shows_every_kind_of_difference_and_exits_with_3() -> None:
    result = run(damaged(), "compare", "--only-bad")
    assert result.exit_code == 3
    rows = [line for line in result.stdout.splitlines() if line.strip()[0].isdigit()]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    for row, words in zip(rows, ("corrupt at b0", "missing at b1", "diverged: b0,b1 | b2"), strict=True):
        assert row.endswith(words) or (words.startswith("diverged") and "diverged: " in row)
    assert "corrupt lac=0" in rows[0]
    assert "absent" in rows[1]
    assert (
        "ledger 7 (closed) differs: 5 entries from 0 to 4: 2 agree, 1 corrupt, 1 missing, 1 diverged" in result.stdout
    )


def test_compare_with_json_prints_a_line_for_each_entry_then_the_summary() -> None:
    result = run(damaged(), "compare", "--json")
    assert result.exit_code == 3
    *rows, summary = lines(result)
    assert [row["verdict"] for row in rows] == ["agree", "corrupt", "missing", "diverged", "agree"]
    assert rows[1]["copies"]["b0"]["reason"] == "entry digest mismatch"
    assert rows[2]["copies"]["b1"] == {"verdict": "absent"}
    sums = {bookie: copy["crc32c"] for bookie, copy in rows[3]["copies"].items()}
    assert sums["b0"] == sums["b1"] != sums["b2"]
    assert (summary["verdict"], summary["entries"], summary["diverged"]) == ("differs", 5, 1)
    assert summary["bookies"]["b0"] == {"good": 4, "corrupt": 1}
    assert [row["entry_id"] for row in lines(run(damaged(), "compare", "--json", "--only-bad"))[:-1]] == [1, 2, 3]


def test_compare_is_incomplete_if_a_bookie_is_down_unless_copies_differ() -> None:
    source = FakeReplicas([b"zero", b"one"])
    source.down[BookieId("b1")] = "bookie cannot be reached"
    result = run(source, "compare")
    assert result.exit_code == 1
    assert "incomplete" in result.stdout
    assert "not all copies could be read: b1: bookie cannot be reached (2 entries)" in result.stderr
    source.corrupt("b0", 1)
    assert run(source, "compare").exit_code == 3


def test_compare_reads_a_range_beyond_the_last_confirmed_entry() -> None:
    source = FakeReplicas([b"zero", b"one", b"two"], closed=False)
    source.put("b1", 3, b"in flight")
    result = run(source, "compare", "--first", "2", "--last", "4", "--json")
    assert result.exit_code == 0
    *rows, summary = lines(result)
    assert [(row["entry_id"], row["verdict"]) for row in rows] == [
        (2, "agree"),
        (3, "unacknowledged"),
        (4, "unacknowledged"),
    ]
    assert (summary["last_confirmed"], summary["state"]) == (2, "open")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--first", "3", "--last", "2"), "--last is before --first"), (("--first", "9"), "--last reads entries beyond")],
)
def test_an_empty_range_is_refused_with_the_fix(arguments: tuple[str, ...], words: str) -> None:
    result = run(FakeReplicas([b"x"]), "compare", *arguments)
    assert isinstance(result.exception, BadRequest)
    assert words in str(result.exception)


def test_an_empty_ledger_agrees() -> None:
    result = run(FakeReplicas([]), "compare")
    assert (result.exit_code, result.stdout) == (0, "ledger 7 (closed): no confirmed entries\n")


def test_columns_show_each_ensemble_and_no_copy_outside_the_write_set() -> None:
    source = FakeReplicas([b"x"] * 3, ensembles={0: ("b0", "b1", "b2"), 2: ("b0", "b3", "b2")}, write_quorum=2)
    table = run(source, "compare").stdout.splitlines()
    assert [line.split() for line in table if "verdict" in line] == [
        ["entry", "b0", "b1", "b2", "verdict"],
        ["entry", "b0", "b3", "b2", "verdict"],
    ]
    assert table[1].split()[-2:] == ["-", "agree"]
