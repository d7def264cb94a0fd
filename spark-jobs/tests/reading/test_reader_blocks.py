"""Blocks of the copies of one ledger: equal copies must look equal, and different copies must look different.

`judgement` repeats `checks.copies.suspects` in plain Python. `expand` shows which copies the rows contain.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_spark.reading import blocks as blocks_module
from bindery_spark.reading import reader as reader_module
from bindery_spark.reading.blocks import Blocks, expand, span_of
from bindery_spark.reading.fragments import Tail, fragments_of, ledger_of
from bindery_spark.reading.reader import BookieReader
from bindery_spark.reading.throttle import Budget
from scripted_bookie import FakeBookie, FakeMetadata

LEDGER = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)
ENTRIES = 40
SPAN = 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(blocks_module, "SPAN_MAX", SPAN)
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 5)  # responses end within blocks


def frame(entry_id: int, payload: bytes) -> bytes:
    length = 100 * (entry_id + 1)
    return pack(DIGESTER, ledger_id=LEDGER, entry_id=entry_id, lac=entry_id - 1, length=length, payload=payload)


class World:
    """A ledger of ENTRIES entries, and the bookies that its ensemble names."""

    def __init__(self, *, letters: str = "abc", write_quorum: int = 3, lac: int | None = None) -> None:
        """`lac`: LAC of an open ledger; None: the ledger is closed."""
        closed = {"state": LedgerState.CLOSED, "last_entry_id": EntryId(ENTRIES - 1), "length": 100 * ENTRIES}
        segment = Segment(EntryId(0), tuple(map(BookieId, letters)))
        self.metadata = FakeMetadata()
        self.ledger = LedgerMetadata(
            ensemble_size=len(letters),
            write_quorum=write_quorum,
            ack_quorum=2,
            segments=(segment,),
            **({} if lac is not None else closed),
        )
        self.metadata.ledgers[LEDGER] = self.ledger
        self.bookies = {letter: FakeBookie() for letter in letters}
        frames = [frame(n, b"0123456789") for n in range(ENTRIES)]
        for bookie in self.bookies.values():
            bookie.known_ledgers.add(LEDGER)
            bookie.frames.update({(LEDGER, n): each for n, each in enumerate(frames)})
        held = {BookieId(letter): ENTRIES - 1 for letter in letters}
        self.tail = None if lac is None else Tail(lac, length=100 * ENTRIES, length_at=ENTRIES - 1, held=held)

    def put(self, letter: str, entry_id: int, content: bytes | None) -> None:
        if content is None:
            del self.bookies[letter].frames[LEDGER, entry_id]
        else:
            self.bookies[letter].frames[LEDGER, entry_id] = content

    async def read(self, letter: str, *, entries: str = "all") -> list[dict[str, Any]]:
        ledger = ledger_of(LEDGER, self.ledger, self.tail)
        parts = (each.confirmed() for each in fragments_of(ledger, self.ledger, self.tail))
        reader = BookieReader(
            self.bookies[letter],
            self.metadata,
            BookieId(letter),
            timeout_s=0.2,  # type: ignore[arg-type]
            budget=Budget(0, now=asyncio.get_running_loop().time()),
            rows=Blocks(letter, ends_only=entries == "ends"),
        )
        mine = [part for part in parts if part is not None and part.bookie_id == letter]
        return [row async for batch in reader.read(mine, entries=entries) for row in batch.to_pylist()]

    async def rows(self, *, entries: str = "all") -> list[dict[str, Any]]:
        return [row for letter in self.bookies for row in await self.read(letter, entries=entries)]


def judgement(rows: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """State of each block: intact, suspect, or silent (no bookie answered)."""
    sides: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        sides[row["block"], row["stripe"]].append(row)
    found = {}
    for key, copies in sides.items():
        whole = {row["fingerprint"] for row in copies if row["bad"] == row["unknown"] == 0}
        silent = [row for row in copies if row["unknown"] == row["copies"]]
        mixed = [row for row in copies if (row["bad"] or row["unknown"]) and row not in silent]
        found[key] = "suspect" if mixed or len(whole) > 1 else "intact" if whole else "silent"
    return found


def suspects(rows: list[dict[str, Any]]) -> set[int]:
    return {block for (block, _), words in judgement(rows).items() if words == "suspect"}


def states(rows: list[dict[str, Any]], letter: str) -> dict[int, str]:
    words = {(True, True): "good", (True, False): "bad", (False, None): "absent", (True, None): "listed"}
    copies = [each for row in rows if row["bookie"] == letter for each in expand(row)]
    assert len({each[2] for each in copies}) == len(copies), "an entry has one row"
    return {each[2]: words.get((each[5], each[6]), (each[11] or "").split(":")[0]) for each in copies}


@pytest.mark.parametrize(("letters", "quorum"), [("abc", 3), ("abcd", 2), ("abcde", 3)])
async def test_equal_copies_are_intact_for_all_forms_of_responses(letters: str, quorum: int) -> None:
    world = World(letters=letters, write_quorum=quorum)
    world.bookies["a"].batch_entries_max = 3
    world.bookies["b"].supports_batch_reads = False
    rows = await world.rows()
    assert set(judgement(rows).values()) == {"intact"}
    assert sum(row["copies"] for row in rows) == quorum * ENTRIES


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda n: frame(n, b"another one"), id="payload"),
        pytest.param(lambda n: frame(n, b"012345678"), id="shorter"),
        pytest.param(lambda n: frame(n, b"0123456789")[:-1] + b"!", id="damaged"),
        pytest.param(lambda n: frame(n + 1, b"0123456789"), id="neighbour"),
        pytest.param(lambda _: None, id="missing"),
        pytest.param(lambda _: b"", id="nothing"),
    ],
)
@pytest.mark.parametrize("where", [(0,), (7,), (8,), (39,), (32, 33, 34, 35, 36, 37, 38, 39), tuple(range(40))])
@pytest.mark.parametrize("letters_changed", ["a", "bc", "abc"])
async def test_a_fault_is_suspect_at_any_place_on_any_number_of_copies(
    change: Callable[[int], bytes | None], where: tuple[int, ...], letters_changed: str
) -> None:
    """This includes faults that all copies have, except another payload: such copies are equal."""
    world = World()
    for letter in letters_changed:
        for entry_id in where:
            world.put(letter, entry_id, change(entry_id))
    rows = await world.rows()
    is_other = change(0) in (frame(0, b"another one"), frame(0, b"012345678"))
    assert suspects(rows) == (set() if is_other and letters_changed == "abc" else {n // SPAN for n in where})
    assert {row["copies"] for row in rows} == {SPAN}, "each row describes the whole block"


async def test_a_share_with_gaps_is_compared_stripe_by_stripe() -> None:
    world = World(letters="abcd", write_quorum=2)
    world.put("b", 4, None)  # the write set of entry 4 is a, b
    rows = await world.rows()
    assert {key for key, words in judgement(rows).items() if words == "suspect"} == {(0, 0)}
    assert states(rows, "b")[4] == "absent"


@pytest.mark.parametrize("answers", [1, 2, 5])
async def test_a_bookie_that_dies_within_a_block_has_known_and_unknown_entries(
    answers: int,
) -> None:
    world = World()
    dying = world.bookies["b"]
    take = dying.take

    def until_then(requests: list[Any], sink: Any, timeout_s: float) -> None:
        if len(dying.requests) >= answers:
            dying.is_registered = False
        take(requests, sink, timeout_s)

    dying.take = until_then  # type: ignore[method-assign]
    world.put("b", 2, frame(2, b"another one"))
    world.put("c", 39, None)
    rows = await world.rows()
    read = 5 * answers
    assert states(rows, "b") == {n: "good" if n < read else "unreachable" for n in range(ENTRIES)}
    assert sum(row["unknown"] for row in rows if row["bookie"] == "b") == ENTRIES - read
    # Its earlier entries are compared, and so are the copies of the other bookies.
    assert {0, 4} <= suspects(rows) <= {0, 4, read // SPAN}


async def test_a_ledger_that_is_deleted_during_the_read_has_no_faults() -> None:
    world = World()
    for entry_id in range(20, ENTRIES):
        world.put("b", entry_id, None)
    world.metadata.ledgers.clear()
    rows = await world.rows()
    assert states(rows, "b") == dict.fromkeys(range(20), "good")
    assert sum(row["bad"] + row["unknown"] for row in rows) == 0
    # The incomplete block is suspect and compared entry by entry: no entry differs.
    assert suspects(rows) == {20 // SPAN}


async def test_entries_added_to_an_open_ledger_during_the_read_are_no_difference() -> None:
    """Beyond the LAC of the plan, bookies have different entries and different bytes."""
    world = World(lac=20)
    world.put("a", 21, None)
    world.put("b", 22, frame(22, b"of a writer that died"))
    rows = await world.rows()
    assert set(judgement(rows).values()) == {"intact"}
    assert {row["bookie"]: states(rows, row["bookie"]) for row in rows} == {
        letter: dict.fromkeys(range(21), "good") for letter in "abc"
    }
    world.put("c", 20, None)
    rows = await world.rows()
    assert suspects(rows) == {20 // SPAN}, "the last confirmed entry is checked"
    assert states(rows, "c")[20] == "absent"


@pytest.mark.parametrize(("letters", "quorum"), [("abc", 3), ("abcd", 2)])
async def test_each_end_is_a_block_of_one_entry(letters: str, quorum: int) -> None:
    world = World(letters=letters, write_quorum=quorum)
    rows = await world.rows(entries="ends")
    assert set(judgement(rows).values()) == {"intact"}
    assert {row["copies"] for row in rows} == {1}
    world.put("a", 0, frame(0, b"another one"))
    rows = await world.rows(entries="ends")
    assert suspects(rows) == {0}
    assert {row["first_entry"] for row in rows if row["block"] == 0} == {0}


async def test_an_end_that_is_missing_on_one_bookie_is_read_from_the_others() -> None:
    """Entry 1 is the first entry of c's share only, but b also stores it."""
    world = World(letters="abc", write_quorum=2)
    world.put("c", 1, None)
    rows = await world.rows(entries="ends")
    assert suspects(rows) == {1}
    assert {letter: states(rows, letter).get(1) for letter in "abc"} == {"a": None, "b": "good", "c": "absent"}


@pytest.mark.parametrize("letters_changed", ["a", "ab", "abc"])
async def test_blocks_of_listed_and_of_read_entries_are_suspect_and_agree(letters_changed: str) -> None:
    """At the level standard, a bookie that does not support lists is read."""
    world = World()
    for letter in letters_changed:
        world.bookies[letter].list_status = -1
    rows = await world.rows(entries="listed")
    found = [states(rows, letter) for letter in "abc"]
    assert all(set(each.values()) <= {"good", "listed"} and len(each) == ENTRIES for each in found)
    assert suspects(rows) == (set() if letters_changed == "abc" else set(range(ENTRIES // SPAN)))


def test_the_span_is_as_assumed_by_these_tests() -> None:
    assert span_of(ledger_of(LEDGER, World().ledger, None)) == SPAN
