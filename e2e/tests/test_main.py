"""`python -m bindery_e2e`: output and exit codes of its commands."""

import json
from pathlib import Path

import pytest
from bindery_e2e.__main__ import EXIT_CODES, main, parser
from bindery_e2e.judging.history import History
from histories import TRUTH, Story, good


def test_a_plan_is_printed_and_depends_on_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--seed", "7", "--steps", "3"]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 3
    assert main(["plan", "--seed", "7", "--steps", "3"]) == 0
    assert capsys.readouterr().out == first


def test_an_old_history_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        history.observe("ready", ready=1, wanted=2)
    assert main(["judge", str(path), "--report", str(tmp_path / "again")]) == EXIT_CODES["BAD"]
    assert "verdict: BAD" in capsys.readouterr().out
    assert (tmp_path / "again" / "report.html").exists()


@pytest.mark.parametrize("reason", ["not whole after the last fault: 1 ledgers marked", "stopped by hand"])
def test_an_old_history_of_a_run_that_failed_is_not_judged_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """All observations are good: without the recorded failure, the verdict is GOOD; with it, INCOMPLETE."""
    story = good()
    story.read(*TRUTH)
    path = tmp_path / "history.jsonl"
    write(path, story)
    monkeypatch.setattr("bindery_e2e.__main__.REQUIRED", ())
    assert main(["judge", str(path)]) == EXIT_CODES["GOOD"]
    story.add("observation", what="incomplete", reason=reason)
    write(path, story)
    assert main(["judge", str(path), "--report", str(tmp_path / "again")]) == EXIT_CODES["INCOMPLETE"]
    assert "verdict: INCOMPLETE" in capsys.readouterr().out
    assert f"incomplete: {reason}" in (tmp_path / "again" / "summary.txt").read_text()


def write(path: Path, story: Story) -> None:
    lines = [
        json.dumps({"type": one.type, "at": one.at, "wall": one.wall, "n": one.n, **one.values})
        for one in story.records
    ]
    path.write_text("\n".join(lines) + "\n")


def test_a_missing_history_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "no/such/history.jsonl"]) == EXIT_CODES["BAD"]
    assert "there is no no/such/history.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["chaos", "quick", "plan", "images", "ordering", "kills", "retries", "repeats", "delayed", "judge"]
)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([verb, "--help"])
    assert ended.value.code == 0
    assert "--" in capsys.readouterr().out
