"""Three bookies of one ledger, read as blocks: what differs must not look equal, and what is equal not different.

`judgement` is what `checks.copies.suspects` asks of rows, in plain Python; which copies are then taken apart, and that
the rows hold what they must, is asked of `expand`.
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
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 5)  # answers end in the middle of blocks


def frame(entry_id: int, payload: bytes) -> bytes:
    length = 100 * (entry_id + 1)
    return pack(DIGESTER, ledger_id=LEDGER, entry_id=entry_id, lac=entry_id - 1, length=length, payload=payload)


class World:
    """A ledger of ENTRIES entries, and the bookies that its ensemble names."""

    def __init__(self, *, letters: str = "abc", write_quorum: int = 3, lac: int | None = None) -> None:
        """`lac`: of a ledger that is open."""
        closed = {"state": LedgerState.CLOSED, "last_entry_id": EntryId(ENTRIES - 1), "length": 100 * ENTRIES}
        segment = Segment(EntryId(0), tuple(map(BookieId, letters)))
        self.metadata = FakeMetadata()
        self.ledger = LedgerMetadata(
            ensemble_size=len(letters), write_quorum=write_quorum, ack_quorum=2, segments=(segment,),
            **({} if lac is not None else closed),
        )  # fmt: skip
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
            self.bookies[letter], self.metadata, BookieId(letter), timeout_s=0.2,  # type: ignore[arg-type]
            budget=Budget(0, now=asyncio.get_running_loop().time()), rows=Blocks(letter, ends_only=entries == "ends"),
        )  # fmt: skip
        mine = [part for part in parts if part is not None and part.bookie_id == letter]
        return [row async for batch in reader.read(mine, entries=entries) for row in batch.to_pylist()]

    async def rows(self, *, entries: str = "all") -> list[dict[str, Any]]:
        return [row for letter in self.bookies for row in await self.read(letter, entries=entries)]


def judgement(rows: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Of each block: well, or suspect, or silent (nobody could say anything)."""
    sides: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        sides[row["block"], row["stripe"]].append(row)
    found = {}
    for key, copies in sides.items():
        whole = {row["fingerprint"] for row in copies if row["bad"] == row["unknown"] == 0}
        silent = [row for row in copies if row["unknown"] == row["copies"]]
        mixed = [row for row in copies if (row["bad"] or row["unknown"]) and row not in silent]
        found[key] = "suspect" if mixed or len(whole) > 1 else "well" if whole else "silent"
    return found


def suspects(rows: list[dict[str, Any]]) -> set[int]:
    return {block for (block, _), words in judgement(rows).items() if words == "suspect"}


def states(rows: list[dict[str, Any]], letter: str) -> dict[int, str]:
    words = {(True, True): "good", (True, False): "bad", (False, None): "absent", (True, None): "listed"}
    told = [each for row in rows if row["bookie"] == letter for each in expand(row)]
    assert len({each[2] for each in told}) == len(told), "an entry is told once"
    return {each[2]: words.get((each[5], each[6]), (each[11] or "").split(":")[0]) for each in told}


@pytest.mark.parametrize(("letters", "quorum"), [("abc", 3), ("abcd", 2), ("abcde", 3)])
async def test_copies_that_are_equal_are_well_however_their_bookies_answer(letters: str, quorum: int) -> None:
    world = World(letters=letters, write_quorum=quorum)
    world.bookies["a"].batch_entries_max = 3
    world.bookies["b"].knows_batch_reads = False
    rows = await world.rows()
    assert set(judgement(rows).values()) == {"well"}
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
@pytest.mark.parametrize("who", ["a", "bc", "abc"])
async def test_a_fault_is_seen_at_any_place_on_any_number_of_copies(
    change: Callable[[int], bytes | None], where: tuple[int, ...], who: str
) -> None:
    """Also the same fault on all copies; but for another payload, which is then the payload."""
    world = World()
    for letter in who:
        for entry_id in where:
            world.put(letter, entry_id, change(entry_id))
    rows = await world.rows()
    is_other = change(0) in (frame(0, b"another one"), frame(0, b"012345678"))
    assert suspects(rows) == (set() if is_other and who == "abc" else {n // SPAN for n in where})
    assert {row["copies"] for row in rows} == {SPAN}, "each row is of the whole block, whatever is there"


async def test_a_share_with_gaps_is_compared_stripe_by_stripe() -> None:
    world = World(letters="abcd", write_quorum=2)
    world.put("b", 4, None)  # the write set of entry 4 is a, b
    rows = await world.rows()
    assert {key for key, words in judgement(rows).items() if words == "suspect"} == {(0, 0)}
    assert states(rows, "b")[4] == "absent"


@pytest.mark.parametrize("answers", [1, 2, 5])
async def test_a_bookie_that_dies_in_the_middle_of_a_block_has_what_it_said_and_could_not_say_the_rest(
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
    said = 5 * answers
    assert states(rows, "b") == {n: "good" if n < said else "unreachable" for n in range(ENTRIES)}
    assert sum(row["unknown"] for row in rows if row["bookie"] == "b") == ENTRIES - said
    # What it said before is compared all the same, and so are the others.
    assert {0, 4} <= suspects(rows) <= {0, 4, said // SPAN}


async def test_a_ledger_that_is_deleted_meanwhile_has_neither_holes_nor_differences() -> None:
    world = World()
    for entry_id in range(20, ENTRIES):
        world.put("b", entry_id, None)
    world.metadata.ledgers.clear()
    rows = await world.rows()
    assert states(rows, "b") == dict.fromkeys(range(20), "good")
    assert sum(row["bad"] + row["unknown"] for row in rows) == 0
    # The block that it lost a part of is looked at entry by entry: nothing in it differs.
    assert suspects(rows) == {20 // SPAN}


async def test_what_an_open_ledger_gains_meanwhile_is_no_difference() -> None:
    """Beyond the LAC of the plan one bookie has more than another, and other bytes."""
    world = World(lac=20)
    world.put("a", 21, None)
    world.put("b", 22, frame(22, b"of a writer that died"))
    rows = await world.rows()
    assert set(judgement(rows).values()) == {"well"}
    assert {row["bookie"]: states(rows, row["bookie"]) for row in rows} == {
        letter: dict.fromkeys(range(21), "good") for letter in "abc"
    }
    world.put("c", 20, None)
    rows = await world.rows()
    assert suspects(rows) == {20 // SPAN}, "the last confirmed one is still looked at"
    assert states(rows, "c")[20] == "absent"


@pytest.mark.parametrize(("letters", "quorum"), [("abc", 3), ("abcd", 2)])
async def test_the_ends_alone_are_blocks_of_one_entry(letters: str, quorum: int) -> None:
    world = World(letters=letters, write_quorum=quorum)
    rows = await world.rows(entries="ends")
    assert set(judgement(rows).values()) == {"well"}
    assert {row["copies"] for row in rows} == {1}
    world.put("a", 0, frame(0, b"another one"))
    rows = await world.rows(entries="ends")
    assert suspects(rows) == {0}
    assert {row["first_entry"] for row in rows if row["block"] == 0} == {0}


async def test_an_end_that_one_bookie_lacks_is_not_lost_where_shares_differ() -> None:
    """Entry 1 is the first of c's share alone; b has it, too."""
    world = World(letters="abc", write_quorum=2)
    world.put("c", 1, None)
    rows = await world.rows(entries="ends")
    assert suspects(rows) == {1}
    assert {letter: states(rows, letter).get(1) for letter in "abc"} == {"a": None, "b": "good", "c": "absent"}


@pytest.mark.parametrize("who", ["a", "ab", "abc"])
async def test_a_list_and_a_reading_of_the_same_are_looked_at_and_agree(who: str) -> None:
    """At the level standard one bookie may not know lists, and is read."""
    world = World()
    for letter in who:
        world.bookies[letter].list_status = -1
    rows = await world.rows(entries="listed")
    told = [states(rows, letter) for letter in "abc"]
    assert all(set(each.values()) <= {"good", "listed"} and len(each) == ENTRIES for each in told)
    assert suspects(rows) == (set() if who == "abc" else set(range(ENTRIES // SPAN)))


def test_span_is_what_the_tests_think() -> None:
    assert span_of(ledger_of(LEDGER, World().ledger, None)) == SPAN
