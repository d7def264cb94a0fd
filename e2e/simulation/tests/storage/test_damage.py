"""Goal: harmed files of real directories never make the engine say what is not so; and this search would notice."""

import random
from pathlib import Path

import pytest
from bindery_simulation.storage import damage
from bindery_simulation.storage.command import main
from bindery_simulation.storage.double_fault import CUT_AND_INDEX_LOST
from bindery_simulation.storage.harm import CHANGES, REMOVED, Harm, do_harm
from bindery_simulation.storage.mutants import DAMAGE_MUTANTS, FIRST_SEEDS, hunt_damage
from bindery_simulation.storage.runner import quietly
from bindery_simulation.storage.templates import Template, make_template, scratch_directory

CASES_MAX = 1_000
"""On what twenty bookies left behind: six in a row may have died with next to nothing in their journals."""


def test_harmed_files_never_lie() -> None:
    tally = quietly(lambda first: damage.run_cases(first, 60), 20_000)
    assert not tally.failed, f"seed {tally.failed[0][0]}: {tally.failed[0][1]}"
    assert tally.cases == 60
    assert tally.entries_right > 1_000
    assert tally.ended["served"] > 20
    assert tally.ended["refused"] > 3
    assert tally.harms[CUT_AND_INDEX_LOST]
    assert {"journal", "entry log", "LastLogMark", "LevelDB CURRENT", "LevelDB MANIFEST"} <= tally.files.keys()


@pytest.mark.simulator
@pytest.mark.parametrize("name", sorted(DAMAGE_MUTANTS))
def test_a_check_left_out_is_noticed(name: str) -> None:
    found = quietly(lambda cases: hunt_damage(name, cases_max=cases, first=FIRST_SEEDS.get(name, 0)), CASES_MAX)
    assert found is not None
    assert found[1].problems[0].name in DAMAGE_MUTANTS[name].caught_by, str(found[1])


def test_a_copy_of_a_block_never_written_is_zeros_whatever_made_them() -> None:
    """Over the last groups of a journal it is the wiped end that no store can tell from one never written."""
    outcome = quietly(damage.replay, 1_795_337_490)
    assert (outcome.harm.kind, outcome.ended, outcome.problems) == ("zeros", "wiped", [])
    assert "copied to" in outcome.harm.told


def test_zeros_over_the_heads_of_the_last_groups_look_like_one_that_was_cut_short() -> None:
    outcome = quietly(damage.replay, 1_795_001_488)
    assert (outcome.harm.kind, outcome.ended, outcome.problems) == ("zeros", "wiped", [])


def test_harm_is_what_it_says_it_is(tmp_path: Path) -> None:
    before = random.Random(1).randbytes(20_000)
    seen: set[str] = set()
    for seed in range(300):
        (tmp_path / "f").write_bytes(before)
        harm = do_harm(str(tmp_path), "f", random.Random(seed))
        seen.add(harm.kind)
        if harm.kind == REMOVED:
            assert not (tmp_path / "f").exists()
            continue
        after = (tmp_path / "f").read_bytes()
        assert (after == before) == (harm.kind == "unchanged")
        assert after[: harm.start] == before[: harm.start]
        if len(after) == len(before):
            assert after[harm.stop :] == before[harm.stop :]
    assert seen >= {*CHANGES, REMOVED}


@pytest.fixture(scope="module")
def killed() -> Template:
    """Of a bookie that died with several groups in its journal."""
    with scratch_directory() as directory:
        for seed in range(100):
            template = make_template(seed, f"{directory}/{seed}")
            if template.is_killed and len(template.groups) > 4:
                return template
    raise AssertionError("no such template")


def test_only_the_end_of_a_journal_is_excused(killed: Template) -> None:
    """A lost group may be explained by zeros over it and all behind it; not by damage to another, or by a cut."""
    last, before = killed.groups[-1], killed.groups[-3]
    end = dict(killed.files)[last.path]

    def excused(kind: str, start: int, stop: int, path: str = last.path) -> int:
        return len(damage.lost_groups(killed, Harm(kind, path, start, stop, "")))

    assert excused("flipped bit", last.offset + 40, last.offset + 41) == 1
    assert excused("flipped bit", before.offset + 40, before.offset + 41) == 0
    assert excused("zeros", last.offset, end) == 1
    assert excused("zeros", last.offset, end, path="journal/current/other.txn") == 0
    assert excused("truncated", before.offset, end) == 0
    if before.path == last.path:
        assert excused("zeros", before.offset, end) == 3
        assert excused("zeros", before.offset, last.offset + 32) == 3, "the last one's head is gone, too"
        assert excused("zeros", before.offset, last.offset) == 0
        assert excused("zeros", before.offset, before.offset + 512) == 0


def test_the_command_counts_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["damage", "--cases", "12", "--first", "100"]) == 0
    assert "12 damaged files, 0 violations; seeds from 100" in capsys.readouterr().out.splitlines()[-1]
    assert main(["damage", "--case", "105"]) == 0
    assert capsys.readouterr().out.startswith("seed 105: ")
