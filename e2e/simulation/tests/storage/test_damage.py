"""An engine on damaged files of real directories never gives wrong answers."""

import random
from pathlib import Path

import pytest
from bindery_simulation.runner import quietly
from bindery_simulation.storage import damage
from bindery_simulation.storage.double_fault import CUT_AND_INDEX_LOST
from bindery_simulation.storage.harm import CHANGES, REMOVED, Harm, do_harm
from bindery_simulation.storage.templates import Template, make_template, scratch_directory


def test_damaged_files_never_give_wrong_answers() -> None:
    tally = quietly(lambda first: damage.run_cases(first, 60), 20_000)
    assert not tally.failed, f"seed {tally.failed[0].seed}: {tally.failed[0]}"
    assert tally.count == 60
    assert tally.entries_right > 1_000
    assert tally.ended["served"] > 20
    assert tally.ended["refused"] > 3
    assert tally.harms[CUT_AND_INDEX_LOST]
    assert {"journal", "entry log", "LastLogMark", "LevelDB CURRENT", "LevelDB MANIFEST"} <= tally.files.keys()


def test_a_copied_block_of_zeros_counts_as_zeros() -> None:
    """If the block covers the last groups of a journal, the end is wiped, which no store can detect."""
    outcome = quietly(damage.replay, 1_795_337_490)
    assert (outcome.harm.kind, outcome.ended, outcome.problems) == ("zeros", "wiped", [])
    assert "copied to" in outcome.harm.text


def test_zeros_over_the_headers_of_the_last_groups_look_like_an_incomplete_group() -> None:
    outcome = quietly(damage.replay, 1_795_001_488)
    assert (outcome.harm.kind, outcome.ended, outcome.problems) == ("zeros", "wiped", [])


def test_an_entry_that_the_check_added_without_a_fence_exists_at_the_second_start() -> None:
    """The wiped end held the fence, so the first start accepts the add with which the check tests it."""
    outcome = quietly(damage.replay, 1_795_791_540)
    assert (outcome.harm.kind, outcome.ended, outcome.problems) == ("zeros", "wiped", [])


def test_damage_changes_only_the_bytes_that_it_names(tmp_path: Path) -> None:
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
    """A template of a killed bookie with several groups in its journal."""
    with scratch_directory() as directory:
        for seed in range(100):
            template = make_template(seed, f"{directory}/{seed}")
            if template.is_killed and len(template.groups) > 4:
                return template
    raise AssertionError("no such template")


def test_only_the_end_of_a_journal_may_be_lost(killed: Template) -> None:
    """Damage to the last group, or zeros over a group and all later groups, may lose these groups. Damage to earlier
    groups alone, or a truncation before the last group, may not."""
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
        assert excused("zeros", before.offset, last.offset + 32) == 3, "the header of the last group is zeros too"
        assert excused("zeros", before.offset, last.offset) == 0
        assert excused("zeros", before.offset, before.offset + 512) == 0
