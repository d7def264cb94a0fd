"""Protocol version 2 over a real socket: BookKeeper's bytes, both protocols on one port, batch reads, error numbers."""

import asyncio

import pytest
from bindery_bookie.server import operations as operations_module
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.errors import BinderyError, DamagedStorage, LedgerStateUnknown
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Status

KEY = master_key(b"pw")
CRC32C = Digester(DigestType.CRC32C, b"pw")


def entry(ledger_id: int, entry_id: int, *, lac: int = -1, payload: bytes = b"hello") -> bytes:
    return pack(CRC32C, ledger_id=ledger_id, entry_id=entry_id, lac=lac, length=2**40, payload=payload)


def add(ledger_id: int, entry_id: int, *, key: bytes = KEY, size: int = 5, **fields) -> m.AddRequest:  # type: ignore[no-untyped-def]
    return m.AddRequest(2, ledger_id, entry_id, key, entry(ledger_id, entry_id, payload=bytes(size)), **fields)


def batch(ledger_id: int, first: int, count_max: int = 0, size_max: int = 2**40, **fields) -> m.BatchReadRequest:  # type: ignore[no-untyped-def]
    return m.BatchReadRequest(2, ledger_id, first, 77, count_max, size_max, **fields)


def fence(ledger_id: int, entry_id: int = -1, key: bytes = KEY) -> m.ReadRequest:
    return m.ReadRequest(2, ledger_id, entry_id, flag=m.ReadFlag.FENCE_LEDGER, master_key=key)


L8 = "0000000000000008"
L9 = "0000000000000009"
ZERO = "0000000000000000"
LAST = "ffffffffffffffff"


async def test_the_recorded_requests_of_bookkeepers_v2_client_get_the_recorded_responses(client) -> None:
    """Add, read of the last entry, batch read and errors, byte for byte."""
    body = pack(CRC32C, ledger_id=8, entry_id=0, lac=-1, length=5, payload=b"hello").hex()
    client.send_hex("02010000" + KEY.hex() + body)
    assert (await client.receive_bytes()).hex() == "0201000000000000" + L8 + ZERO
    client.send_hex("02020000" + L8 + LAST)
    assert (await client.receive_bytes()).hex() == "0202000000000000" + L8 + LAST + body
    bodies = [
        pack(CRC32C, ledger_id=9, entry_id=n, lac=n - 1, length=18 * (n + 1), payload=bytes(18)).hex() for n in range(4)
    ]
    for n in range(4):
        client.send_hex("02010000" + KEY.hex() + bodies[n])
        assert (await client.receive_bytes()).hex() == "0201000000000000" + L9 + f"{n:016x}"
    client.send_hex("02070000" + L9 + ZERO + "0000000000000005" + "00000003" + "00000000000003e8")
    expected = "0207000000000000" + L9 + ZERO + "0000000000000005" + "".join("00000036" + b for b in bodies[:3])
    assert (await client.receive_bytes()).hex() == expected
    client.send_hex("02070000" + "0000000000000063" + ZERO + "0000000000000006" + "00000003" + "00000000000003e8")
    assert (await client.receive_bytes()).hex() == "0207000000000001" + "0000000000000063" + ZERO + "0000000000000006"
    client.send_hex("03020000" + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0302000000000067" + L8 + ZERO
    client.send_hex("02030000" + "0a0170120178")
    assert (await client.receive_bytes()).hex() == "02030000" + "0a12" + b"AuthDisabledPlugin".hex() + "1200"


@pytest.mark.parametrize(("word", "answer"), [("00000002", "00000002"), ("01020000", "01020000")])
async def test_older_versions_are_served_and_repeated(client, word, answer) -> None:
    await client.ask_v2(add(8, 0))
    client.send_hex(word + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == answer + "00000000" + L8 + ZERO + entry(8, 0, payload=bytes(5)).hex()


@pytest.mark.parametrize("version", ["03", "7f", "80", "ff"])
async def test_other_versions_are_refused_with_their_byte_repeated(client, version) -> None:
    client.send_v2(m.ReadRequest(2, 1, 0))  # makes it a v2 connection
    await client.receive_v2()
    client.send_hex(version + "010000" + KEY.hex() + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == version + "010000" + "00000067" + L8 + ZERO
    client.send_hex(version + "070000" + L9 + ZERO + "0000000000000005" + "00000003" + "00000000000003e8")
    assert (await client.receive_bytes()).hex() == version + "070000" + "00000067" + L9 + ZERO + "0000000000000005"


async def test_auth_of_any_version_is_answered_in_version_2(client) -> None:
    client.send_hex("01030000" + "0a0170120178")
    assert (await client.receive_bytes()).hex().startswith("02030000")


@pytest.mark.parametrize("opcode", [0, 4, 5, 6, 8, 255])
async def test_other_opcodes_end_the_connection_without_an_answer(client, opcode) -> None:
    client.send_hex(f"02{opcode:02x}0000" + "00" * 40)
    assert await client.is_closed()


@pytest.mark.parametrize("packet", ["02", "020200", "02020000" + L8 + ZERO[:-2], "02010000" + "00" * 35])
async def test_a_packet_that_is_too_short_ends_the_connection(client, packet) -> None:
    client.send_hex(packet)
    assert await client.is_closed()


async def test_v2_may_follow_v3_and_responses_have_the_protocol_of_their_request(bookie, client) -> None:
    """This holds even in one segment, and while reads of both protocols wait."""
    v3_add = m.AddRequest(5, 1, 0, KEY, entry(1, 0))
    assert (await client.ask(v3_add)).status == 0
    client.send(m.ReadRequest(6, 1, 0), m.ReadRequest(7, 1, 9))
    client.send_v2(add(1, 1), m.ReadRequest(2, 1, 0), m.ReadRequest(2, 1, 9))
    found = {await client.receive_bytes() for _ in range(5)}
    as_v2 = {message[:8].hex() for message in found if message[0] == 2}
    assert as_v2 == {"0201000000000000", "0202000000000000", "0202000000000002"}
    assert sum(message[0] == 0x0A for message in found) == 2
    client.send(m.ReadRequest(8, 1, 0))
    assert await client.is_closed(), "v3 behind v2 is no v2"


async def test_adds_of_one_socket_read_are_one_group_in_v2_too(bookie, client) -> None:
    client.send_v2(*[add(5, n) for n in range(100)])
    answers = [await client.receive_v2() for _ in range(100)]
    assert answers == [m.AddResponse(2, 0, 5, n) for n in range(100)]
    assert bookie.store.groups == [100]


async def test_reads_of_one_socket_read_are_one_group_in_v2_too(bookie, client) -> None:
    client.send_v2(*[add(5, n) for n in range(10)])
    for _ in range(10):
        await client.receive_v2()
    client.send_v2(*[m.ReadRequest(2, 5, n) for n in range(10)])
    answers = [await client.receive_v2() for _ in range(10)]
    assert [answer.entry_id for answer in answers] == list(range(10))
    assert bookie.store.read_groups == [10]


async def test_after_a_fencing_read_only_recovery_adds_are_accepted(bookie, client) -> None:
    await client.ask_v2(add(1, 0))
    assert (await client.ask_v2(fence(1, key=b"k" * 20))).status == Status.UNAUTHORIZED
    bookie.store.hold()
    client.send_v2(fence(1), m.ReadRequest(2, 1, 0))
    assert (await client.receive_v2()).entry_id == 0, "the fence is not durable yet"
    bookie.store.release()
    assert await client.receive_v2() == m.ReadResponse(2, 0, 1, -1, entry(1, 0, payload=bytes(5)))
    assert await client.ask_v2(add(1, 1)) == m.AddResponse(2, Status.FENCED, 1, 1)
    assert await client.ask_v2(add(1, 1, recovery=True)) == m.AddResponse(2, 0, 1, 1)


async def test_a_fencing_read_of_version_1_has_no_key_and_is_unauthorized(client) -> None:
    await client.ask_v2(add(8, 0))
    client.send_hex("01020001" + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0102000000000066" + L8 + ZERO
    assert (await client.ask_v2(add(8, 1))).status == 0, "nothing was fenced"


async def test_a_read_only_bookie_accepts_only_v2_adds_of_high_priority(bookie, client) -> None:
    bookie.state.set_read_only("disk", "full")
    bookie.state.high_priority_writes = True
    assert (await client.ask_v2(add(1, 0, recovery=True))).status == Status.READ_ONLY
    assert (await client.ask_v2(add(1, 0, recovery=True, priority=1))).status == 0


def replace_store(bookie, store) -> None:  # type: ignore[no-untyped-def]
    operations = bookie.server.operations
    operations._store = operations._single._store = store


class FailingStore:
    """Reads fail with one status, or with an error raised by the store."""

    def __init__(self, store, outcome) -> None:  # type: ignore[no-untyped-def]
        self._store = store
        self._outcome = outcome

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._store, name)

    def read_many(self, keys, done) -> None:  # type: ignore[no-untyped-def]
        done([self._outcome for _ in keys])

    def add_many(self, adds, done) -> None:  # type: ignore[no-untyped-def]
        done([self._outcome for _ in adds])

    async def fence(self, ledger_id: int, key: bytes) -> None:
        if isinstance(self._outcome, BinderyError):
            raise self._outcome


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
async def test_every_error_status_is_sent_in_both_protocols(bookie, client, status) -> None:
    """A v2 client gets 101 instead of 107, because BookKeeper's client would close its connection."""
    replace_store(bookie, FailingStore(bookie.store, int(status)))
    assert await client.ask(m.ReadRequest(1, 1, 0)) == m.ReadResponse(1, status, 1, 0)
    assert await client.ask(m.AddRequest(2, 1, 0, KEY, entry(1, 0))) == m.AddResponse(2, status, 1, 0)
    in_v2 = Status.IO_ERROR if status is Status.UNKNOWN_LEDGER_STATE else status
    assert await client.ask_v2(m.ReadRequest(2, 1, 0)) == m.ReadResponse(2, in_v2, 1, 0)
    assert await client.ask_v2(add(1, 0)) == m.AddResponse(2, in_v2, 1, 0)
    assert await client.ask_v2(batch(1, 0)) == m.BatchReadResponse(2, in_v2, 1, 0, 77)


@pytest.mark.parametrize("error", [LedgerStateUnknown(), DamagedStorage(), RuntimeError("a bug")])
async def test_a_fence_that_fails_is_an_error_and_never_an_absence(bookie, client, error) -> None:
    store = FailingStore(bookie.store, error)

    async def fence_fails(ledger_id: int, key: bytes) -> None:
        raise error

    store.fence = fence_fails  # type: ignore[method-assign]
    replace_store(bookie, store)
    assert (await client.ask_v2(fence(1))).status == Status.IO_ERROR
    flagged = batch(1, 0, flag=m.ReadFlag.FENCE_LEDGER, master_key=KEY)
    assert (await client.ask_v2(flagged)).status == Status.IO_ERROR


# --- batch reads ------------------------------------------------------------------------------------------------------

SIZE = 36 + 100
"""Bytes of each entry of ledger 3."""


@pytest.fixture
async def filled(client):  # type: ignore[no-untyped-def]
    """Ledger 3 with entries 0 .. 9 and 11."""
    ids = [*range(10), 11]
    client.send_v2(*[add(3, n, size=100) for n in ids])
    for _ in ids:
        assert (await client.receive_v2()).status == 0
    return client


def fits(count: int) -> int:
    """Return the smallest size limit that admits `count` entries."""
    return 24 + 8 + 4 + count * (SIZE + 4)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (batch(3, 0, 4), range(4)),
        (batch(3, 0, 0), range(10)),
        (batch(3, 0, -1), range(10)),
        (batch(3, 8, 100), range(8, 10)),
        (batch(3, 11), [11]),
        (batch(3, 0, 0, fits(3)), range(3)),
        (batch(3, 0, 0, fits(3) - 1), range(2)),
        (batch(3, 0, 2, fits(3)), range(2)),
        (batch(3, 5, 0, 0), [5]),
        (batch(3, 5, 0, -1), [5]),
        (batch(3, 5, 3, fits(1)), [5]),
    ],
)
async def test_a_batch_contains_at_least_one_entry_and_all_that_fit_before_the_first_missing_one(
    filled, request_, expected
) -> None:
    answer = await filled.ask_v2(request_)
    bodies = tuple(entry(3, n, payload=bytes(100)) for n in expected)
    assert answer == m.BatchReadResponse(2, 0, 3, request_.entry_id, 77, bodies)


async def test_a_batch_whose_first_entry_is_missing_is_an_error_as_a_whole(filled) -> None:
    assert await filled.ask_v2(batch(3, 10)) == m.BatchReadResponse(2, Status.NO_ENTRY, 3, 10, 77)
    assert await filled.ask_v2(batch(4, 0)) == m.BatchReadResponse(2, Status.NO_LEDGER, 4, 0, 77)


async def test_a_batch_ends_at_the_greatest_entry_id(filled) -> None:
    top = 2**63 - 1
    for entry_id in (top - 1, top):
        assert (await filled.ask_v2(add(3, entry_id, size=100))).status == 0
    assert len((await filled.ask_v2(batch(3, top - 1, 9))).bodies) == 2
    assert len((await filled.ask_v2(batch(3, top, 9))).bodies) == 1


async def test_the_limit_of_the_bookie_applies_to_batches(start_bookie) -> None:
    bookie = await start_bookie(batch_read_size_max=fits(2))
    client = await bookie.connect()
    for n in range(5):
        await client.ask_v2(add(3, n, size=100))
    assert len((await client.ask_v2(batch(3, 0))).bodies) == 2


async def test_a_fencing_batch_read_fences_first(filled, bookie) -> None:
    answer = await filled.ask_v2(batch(3, 0, 2, flag=m.ReadFlag.FENCE_LEDGER, master_key=KEY))
    assert len(answer.bodies) == 2
    assert bookie.store.ledgers[3].fenced
    answer = await filled.ask_v2(batch(3, 0, 2, flag=m.ReadFlag.FENCE_LEDGER, master_key=b"w" * 20))
    assert (answer.status, answer.bodies) == (Status.UNAUTHORIZED, ())


async def test_a_long_batch_is_read_in_steps(filled, bookie, monkeypatch) -> None:
    monkeypatch.setattr(operations_module, "BATCH_STEP_COUNT_MAX", 3)
    bookie.store.read_groups.clear()
    assert len((await filled.ask_v2(batch(3, 0, 8))).bodies) == 8
    assert bookie.store.read_groups == [3, 3, 2]


async def test_batch_reads_wait_for_the_budget_of_reads(start_bookie) -> None:
    bookie = await start_bookie(reads_size_max=1024 * 1024, unsent_size_max=64 * 1024)
    client = await bookie.connect()
    for n in range(4):
        await client.ask_v2(add(3, n, size=300_000))
    for n in range(30):
        client.send_v2(m.BatchReadRequest(2, 3, 0, n, 0, 5 * 1024 * 1024))
    budget = bookie.server.operations.reads_budget
    worst = 0
    for _ in range(30):
        answer = await client.receive_v2()
        worst = max(worst, budget.used)
        assert len(answer.bodies) == 4
    assert worst < 10 * 1024 * 1024
    async with asyncio.timeout(30):
        while budget.used:
            await asyncio.sleep(0.001)
    assert bookie.server.operations.pending_reads == 0


# --- too many requests ------------------------------------------------------------------------------------------------


async def test_adds_far_over_the_budget_are_refused(start_bookie) -> None:
    """Each connection is paused after one socket read, but many connections together can exceed the budget."""
    bookie = await start_bookie(adds_size_max=64 * 1024)
    bookie.store.hold()
    clients = [await bookie.connect() for _ in range(8)]
    for number, client in enumerate(clients):
        client.send_v2(add(number, 0, size=40_000))
        budget = bookie.server.operations.adds_budget
        async with asyncio.timeout(30):
            while budget.used < min(number + 1, 4) * 40_000:
                await asyncio.sleep(0.001)
    late = [await client.receive_v2() for client in clients[4:]]
    assert [answer.status for answer in late] == [Status.TOO_MANY_REQUESTS] * 4
    assert bookie.metrics.adds_rejected == 4
    bookie.store.release()
    assert [(await client.receive_v2()).status for client in clients[:4]] == [0] * 4
    assert (await clients[7].ask_v2(add(7, 0))).status == 0


async def test_reads_above_the_limit_are_refused_in_both_protocols(start_bookie, monkeypatch) -> None:
    monkeypatch.setattr(operations_module, "PENDING_READS_FREE_COUNT", 0)
    bookie = await start_bookie(pending_reads_max=10)
    client = await bookie.connect()
    await client.ask(m.AddRequest(1, 1, 0, KEY, entry(1, 0)))
    client.send(*[m.ReadRequest(n, 1, 0) for n in range(15)])
    answers = await client.receive_all(15)
    assert [answers[n].status for n in range(15)] == [0] * 10 + [Status.TOO_MANY_REQUESTS] * 5
    client.send_v2(*[m.ReadRequest(2, 1, n) for n in range(11)])
    found = [await client.receive_v2() for _ in range(11)]
    assert [answer.entry_id for answer in found if answer.status == Status.TOO_MANY_REQUESTS] == [10]
    assert bookie.metrics.reads_rejected == 6
