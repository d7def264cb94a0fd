"""Damage one file of a copied bookie directory, start the engine on it, and read everything.

Some cases damage two files so that neither file reveals the damage of the other (`double_fault`).

Allowed: correct bytes, an answer without a result, or a refused start whose message names a file. Forbidden: wrong
bytes, "no such entry" for an acknowledged entry, a lost fence, any other exception, a hang, or memory beyond a limit.

No store can detect that the end of a journal was overwritten with zeros, because the journal then seems to end earlier.
A killed bookie loses the records that are stored only there. `journal_format` documents this for the last group. Such
cases are counted separately, as tears (the last group) and as wiped ends (several last groups).
"""

import os
import random
import resource
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from bindery_bookie.membership import identity
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.journal.journal_format import GROUP_HEADER_SIZE
from bindery_core.errors import BadVersion, Corrupt
from bindery_core.formats.cookie import FILE_NAME, differences, parse

from bindery_simulation.storage import turns
from bindery_simulation.storage.double_fault import CUT_AND_INDEX_LOST, cut_and_lose_index
from bindery_simulation.storage.engines import real_engine
from bindery_simulation.storage.harm import Harm, do_harm
from bindery_simulation.storage.history import History
from bindery_simulation.storage.templates import (
    COOKIE,
    GroupPlace,
    Template,
    list_ledgers,
    make_template,
    scratch_directory,
)
from bindery_simulation.storage.verdict import Finding, Problem, check_engine

CASES_PER_TEMPLATE: Final = 50
"""Number of consecutive seeds whose cases damage copies of the same template."""
MEMORY_KIB_MAX: Final = 400 * 1024
"""Maximum growth in KiB of the peak resident memory by a case. A template and its copy are smaller than 2 MiB."""

DOUBLE_SHARE: Final = 0.08
"""Share of cases with a double fault, if the template has a suitable entry log."""

_RARELY_DAMAGED: Final = ("LevelDB LOCK", "LevelDB LOG")
"""Kinds of files without data, which are damaged less often."""


@dataclass(slots=True)
class Outcome:
    """The result of one case."""

    seed: int
    harm: Harm
    file_kind: str
    ended: str
    """Result of the case: served, limbo, refused, tear, wiped or violated."""
    problems: list[Problem] = field(default_factory=list)
    refusals: int = 0
    is_limbo: bool = False
    entries_right: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.harm.kind}: {self.harm.text}: {self.problems[0] if self.problems else self.ended}"


@dataclass(slots=True)
class Tally:
    """Sums over cases."""

    count: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    harms: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    entries_right: int = 0
    failed: list[Outcome] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.count += other.count
        self.ended.update(other.ended)
        self.harms.update(other.harms)
        self.files.update(other.files)
        self.entries_right += other.entries_right
        self.failed += other.failed


def file_kind(path: str) -> str:
    """Name the kind of a file, without its number."""
    name = os.path.basename(path)
    if "/index/" in path:
        name = {"CURRENT": "CURRENT", "LOCK": "LOCK", "LOG": "LOG", "LOG.old": "LOG"}.get(name, name)
        if name.startswith("MANIFEST"):
            name = "MANIFEST"
        return "LevelDB " + (os.path.splitext(name)[1] or name)
    return {".txn": "journal", ".log": "entry log"}.get(os.path.splitext(name)[1], name)


@dataclass(frozen=True, slots=True)
class Choice:
    """The damage that is possible; an empty tuple permits all kinds."""

    files: tuple[str, ...] = ()
    """Kinds of files, as named by `file_kind`."""
    harms: tuple[str, ...] = ()
    """Kinds of damage, as named in `harm`."""


ALL: Final = Choice()
"""All damage."""


def run_case(template: Template, seed: int, directory: str, choice: Choice = ALL) -> Outcome:
    """Damage a copy of `template` and check it. The copy is in `directory`, which must not exist and is removed."""
    rng = random.Random(f"damage {seed}")
    shutil.copytree(template.directory, directory)
    before_kib = _most_resident_kib()  # the process may have run other work before
    try:
        outcome = _run_copy(template, seed, directory, rng, choice)
    finally:
        shutil.rmtree(directory)
    if (more_kib := _most_resident_kib() - before_kib) > MEMORY_KIB_MAX:
        outcome.ended = "violated"
        outcome.problems.append(Problem("memory", None, f"{more_kib} KiB more are resident"))
    return outcome


def _most_resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _run_copy(template: Template, seed: int, directory: str, rng: random.Random, choice: Choice) -> Outcome:
    there = {file_kind(path) for path, _ in template.files}
    kinds = sorted(there.intersection(choice.files) or there)
    kind = rng.choices(kinds, [1 if kind in _RARELY_DAMAGED else 6 for kind in kinds])[0]
    path = rng.choice([path for path, _ in template.files if file_kind(path) == kind])
    harm = _double_fault(directory, seed, choice)
    if harm is None:
        harm = do_harm(directory, path, rng, kinds=[one for one in choice.harms if one != CUT_AND_INDEX_LOST])
    else:
        path, kind = harm.path, file_kind(harm.path)
    outcome = Outcome(seed, harm, kind, "served")
    if kind == FILE_NAME:
        _check_version(directory, path, outcome)
        return outcome
    starts = 2 if rng.random() < 0.25 else 1
    """Number of starts. The second start shows whether the first one did further damage."""
    history = template.history.copy()
    for _ in range(starts):
        finding = _start_and_check(history, directory, rng, outcome)
        if finding is None:
            break
        outcome.refusals += finding.refused
        outcome.entries_right += finding.right
        problems, excused = _excuse(finding.problems, template, directory, harm)
        outcome.problems += problems
        if problems:
            outcome.ended = "violated"
            break
        outcome.ended = excused or ("limbo" if outcome.is_limbo else outcome.ended)
    return outcome


def _double_fault(directory: str, seed: int, choice: Choice) -> Harm | None:
    """Damage two files if the case is a double fault. Has its own random generator, so that no other case changes."""
    rng = random.Random(f"double {seed}")
    if choice.harms:
        is_wanted = CUT_AND_INDEX_LOST in choice.harms
    else:
        is_wanted = (not choice.files or "entry log" in choice.files) and rng.random() < DOUBLE_SHARE
    return cut_and_lose_index(directory, rng) if is_wanted else None


def _check_version(directory: str, path: str, outcome: Outcome) -> None:
    """Check the file VERSION, from which the bookie reads its identity. The engine never reads this file."""
    text = identity.read_version(RealDisk(), os.path.join(directory, os.path.dirname(os.path.dirname(path))))
    try:
        if text is None or differences(COOKIE, parse(text)):
            outcome.ended = "refused"
    except (Corrupt, BadVersion):
        outcome.ended = "refused"
    except Exception as error:
        outcome.ended = "violated"
        outcome.problems.append(Problem("starts", None, f"VERSION: {type(error).__name__}: {error}"))


def _start_and_check(history: History, directory: str, rng: random.Random, outcome: Outcome) -> Finding | None:
    """Start the engine and read everything. Return None if it failed, with the reason in `outcome`."""

    async def start_and_check() -> Finding | None:
        engine = real_engine(directory, rng)
        try:
            await engine.open()
        except Corrupt as error:
            outcome.text = str(error).replace(directory, "")
            outcome.ended = "refused"
            if not error.facts.get("path"):
                outcome.ended = "violated"
                outcome.problems.append(Problem("starts", None, f"the refusal names no file: {outcome.text}"))
            return None
        if engine.limbo is not None:
            await list_ledgers(engine, history)
            outcome.is_limbo = True
        finding = await check_engine(engine, history, may_be_old=engine.limbo is not None)
        await engine.close()
        return finding

    try:
        return turns.run(start_and_check())
    except BaseException as error:  # no other exception is permitted
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        outcome.ended = "violated"
        outcome.problems.append(Problem("starts", None, f"{type(error).__name__}: {error}".replace(directory, "")))
        return None


def _excuse(
    problems: list[Problem], template: Template, directory: str, harm: Harm
) -> tuple[list[Problem], str | None]:
    """Return the problems, or none and "tear" or "wiped" if the damaged end of the journal explains all of them."""
    if not problems:
        return [], None
    lost = lost_groups(template, harm)
    keys = {key for group in lost for key in group.keys}
    ledgers = {ledger_id for group in lost for ledger_id in group.ledgers}
    for problem in problems:
        assert problem.key is not None
        is_of_lost = problem.key in keys if problem.key[1] >= 0 else problem.key[0] in ledgers
        if not is_of_lost:
            return problems, None
    return [], "tear" if len(lost) == 1 else "wiped"


def lost_groups(template: Template, harm: Harm) -> list[GroupPlace]:
    """Return the last groups of the journal that the damage removed undetectably.

    The damage covers the range from the first of these groups to the end of the records, or the header of the last
    group. The rest then seems to be one large group whose write was incomplete.
    """
    if not template.groups or harm.path != template.groups[-1].path or harm.kind not in ("zeros", "truncated"):
        return [group for group in template.groups[-1:] if _overlaps(harm, group)]
    last = template.groups[-1]
    if harm.stop < last.offset + GROUP_HEADER_SIZE or harm.kind == "truncated":
        return [last] if _overlaps(harm, last) and harm.start >= last.offset else []
    return [group for group in template.groups if group.path == harm.path and group.offset + group.size > harm.start]


def _overlaps(harm: Harm, group: GroupPlace) -> bool:
    return harm.path == group.path and harm.start < group.offset + group.size and group.offset < harm.stop


def replay(seed: int) -> Outcome:
    """Run one case alone."""
    return next(each_case([seed]))


def run_cases(first: int, count: int, choice: Choice = ALL) -> Tally:
    """Run the cases `first`, `first` + 1, ..."""
    tally = Tally()
    for outcome in each_case(range(first, first + count), choice):
        tally.count += 1
        tally.ended[outcome.ended] += 1
        tally.harms[outcome.harm.kind] += 1
        tally.files[outcome.file_kind] += 1
        tally.entries_right += outcome.entries_right
        if outcome.problems:
            tally.failed.append(outcome)
    return tally


def each_case(seeds: Iterable[int], choice: Choice = ALL) -> Iterator[Outcome]:
    """Run each case on the template that its seed determines. Consecutive seeds share a template."""
    template: Template | None = None
    made = -1
    with scratch_directory() as directory:
        for seed in seeds:
            number = seed // CASES_PER_TEMPLATE
            if template is None or made != number:
                if template is not None:
                    shutil.rmtree(template.directory)
                template, made = make_template(number, directory), number
            yield run_case(template, seed, f"{directory}/copy-{seed}", choice)
