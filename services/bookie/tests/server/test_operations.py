"""Every operation over a real socket, with BookKeeper's bytes where they were recorded."""

import asyncio

import pytest
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack, pack_lac
from bindery_core.formats import availability
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Status

KEY = master_key(b"pw")
MAC = Digester(DigestType.MAC, b"pw")
CRC32C = Digester(DigestType.CRC32C, b"pw")
MINUS_ONE = "ffffffffffffffffff01"


def entry(ledger_id: int, entry_id: int, *, lac: int = -1, payload: bytes = b"hello") -> bytes:
    return pack(CRC32C, ledger_id=ledger_id, entry_id=entry_id, lac=lac, length=5 * entry_id + 5, payload=payload)


def add(txn_id: int, ledger_id: int, entry_id: int, **fields) -> m.AddRequest:  # type: ignore[no-untyped-def]
    lac = fields.pop("lac", -1)
    key = fields.pop("key", KEY)
    return m.AddRequest(txn_id, ledger_id, entry_id, key, entry(ledger_id, entry_id, lac=lac), **fields)


async def test_the_recorded_requests_of_bookkeepers_client_get_the_recorded_responses(client) -> None:
    """Add, read LAC, read and write LAC, byte for byte."""
    body = pack(MAC, ledger_id=0, entry_id=0, lac=-1, length=5, payload=b"hello").hex()
    packet = pack_lac(MAC, ledger_id=0, lac=1).hex()
    client.send_hex("0a06080310021801aa0655080010001a14" + KEY.hex() + "2239" + body)
    assert (await client.receive_bytes()).hex() == "0a060803100218011000aa0606080010001800"
    client.send_hex("0a06080310071807c206020800")
    assert (await client.receive_bytes()).hex() == "0a060803100718071000c2063f080010002239" + body
    client.send_hex("0a0608031001180aa2060408001000")
    expected = "0a0608031001180a1000a2064c0800100018002239" + body + "28" + MINUS_ONE
    assert (await client.receive_bytes()).hex() == expected
    client.send_hex("0a06080310061805ba0640080010011a14" + KEY.hex() + "2224" + packet)
    assert (await client.receive_bytes()).hex() == "0a060803100618051000ba060408001000"


async def test_a_long_poll_for_a_confirmed_entry_is_answered_at_once(client) -> None:
    client.send(add(1, 1, 0), add(2, 1, 1, lac=0), add(3, 1, 2, lac=1), add(4, 1, 3, lac=2))
    await client.receive_all(4)
    client.send_hex("0a06080310011812a20615080110" + MINUS_ONE + "200028b817a00602")
    answer = await client.receive()
    assert answer == m.ReadResponse(18, 0, 1, 1, entry(1, 1, lac=0), 2, 1_700_000_000_002)


async def test_adds_of_one_socket_read_are_one_group(bookie, client) -> None:
    client.send(*[add(n, 5, n) for n in range(100)])
    answers = await client.receive_all(100)
    assert {a.status for a in answers.values()} == {0}
    assert bookie.store.groups == [100]
    assert sorted(bookie.store.ledgers[5].entries) == list(range(100))


async def test_a_response_repeats_the_ids_of_the_request_although_those_of_the_body_are_stored(bookie, client) -> None:
    answer = await client.ask(m.AddRequest(1, 7, 70, KEY, entry(8, 80)))
    assert answer == m.AddResponse(1, 0, 7, 70)
    assert list(bookie.store.ledgers) == [8]


async def test_each_add_of_a_group_gets_its_own_status(client) -> None:
    client.send(add(1, 1, 0), add(2, 1, 1, key=b"another"), m.AddRequest(3, 1, 2, KEY, b"too short"), add(4, 1, 3))
    answers = await client.receive_all(4)
    assert [answers[n].status for n in (1, 2, 3, 4)] == [0, Status.UNAUTHORIZED, Status.BAD_REQUEST, 0]


async def test_the_response_to_a_read_of_the_last_entry_repeats_minus_one(client) -> None:
    client.send(add(1, 1, 0), add(2, 1, 1, lac=0))
    await client.receive_all(2)
    assert await client.ask(m.ReadRequest(3, 1, -1)) == m.ReadResponse(3, 0, 1, -1, entry(1, 1, lac=0), 0)


async def test_reads_of_missing_entries_and_ledgers_have_different_statuses(client) -> None:
    await client.ask(add(1, 1, 0))
    assert await client.ask(m.ReadRequest(2, 1, 9)) == m.ReadResponse(2, Status.NO_ENTRY, 1, 9)
    assert await client.ask(m.ReadRequest(3, 2, 0)) == m.ReadResponse(3, Status.NO_LEDGER, 2, 0)


async def test_a_piggyback_read_without_previous_lac_is_a_plain_read(client) -> None:
    await client.ask(add(1, 1, 0))
    answer = await client.ask(m.ReadRequest(2, 1, 0, flag=m.ReadFlag.ENTRY_PIGGYBACK))
    assert answer == m.ReadResponse(2, 0, 1, 0, entry(1, 0), -1)


def fence(txn_id: int, ledger_id: int, entry_id: int = -1, key: bytes | None = KEY) -> m.ReadRequest:
    return m.ReadRequest(txn_id, ledger_id, entry_id, flag=m.ReadFlag.FENCE_LEDGER, master_key=key)


async def test_after_a_fencing_read_only_recovery_adds_are_accepted(client) -> None:
    await client.ask(add(1, 1, 0))
    assert await client.ask(fence(2, 1)) == m.ReadResponse(2, 0, 1, -1, entry(1, 0))
    assert (await client.ask(add(3, 1, 1))).status == Status.FENCED
    assert (await client.ask(add(4, 1, 1, recovery=True))).status == 0


async def test_fencing_an_unknown_ledger_creates_it(client) -> None:
    assert await client.ask(fence(1, 9)) == m.ReadResponse(1, Status.NO_ENTRY, 9, -1)
    assert (await client.ask(add(2, 9, 0))).status == Status.FENCED


async def test_fencing_needs_the_master_key(client) -> None:
    await client.ask(add(1, 1, 0))
    for txn_id, key in ((2, None), (3, b"wrong")):
        assert await client.ask(fence(txn_id, 1, key=key)) == m.ReadResponse(txn_id, Status.UNAUTHORIZED, 1, -1)
    assert (await client.ask(add(4, 1, 1))).status == 0


async def test_a_fence_is_answered_only_once_it_is_durable(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    bookie.store.hold()
    client.send(fence(2, 1), m.ReadRequest(3, 1, 0))
    assert (await client.receive()).txn_id == 3
    bookie.store.release()
    assert (await client.receive()).txn_id == 2


async def test_adds_force_and_write_lac_are_answered_only_once_they_are_durable(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    bookie.store.hold()
    client.send(
        add(2, 1, 1), m.ForceLedgerRequest(3, 1), m.WriteLacRequest(4, 1, 0, KEY, b"packet"), m.ReadRequest(5, 1, 0)
    )
    assert (await client.receive()).txn_id == 5
    bookie.store.release()
    assert await client.receive_all(3) == {
        2: m.AddResponse(2, 0, 1, 1),
        3: m.ForceLedgerResponse(3, 0, 1),
        4: m.WriteLacResponse(4, 0, 1),
    }


async def test_an_explicit_lac_is_written_and_read(client) -> None:
    packet = pack_lac(CRC32C, ledger_id=1, lac=0)
    assert await client.ask(m.ReadLacRequest(1, 1)) == m.ReadLacResponse(1, Status.NO_ENTRY, 1)
    assert await client.ask(m.WriteLacRequest(2, 1, 0, KEY, packet)) == m.WriteLacResponse(2, 0, 1)
    # For an explicit LAC without entries, the response is an I/O error with the LAC, as in BookKeeper.
    assert await client.ask(m.ReadLacRequest(3, 1)) == m.ReadLacResponse(3, Status.IO_ERROR, 1, packet)
    await client.ask(add(4, 1, 0))
    assert await client.ask(m.ReadLacRequest(5, 1)) == m.ReadLacResponse(5, 0, 1, packet, entry(1, 0))
    answer = await client.ask(m.WriteLacRequest(6, 1, 0, b"wrong", packet))
    assert answer == m.WriteLacResponse(6, Status.UNAUTHORIZED, 1)


async def test_forcing_an_unknown_ledger_succeeds(client) -> None:
    assert await client.ask(m.ForceLedgerRequest(1, 99)) == m.ForceLedgerResponse(1, 0, 99)


@pytest.mark.parametrize(
    ("requested", "total", "free"), [(0, None, None), (1, 1000, None), (2, None, 400), (3, 1000, 400)]
)
async def test_bookie_info_answers_what_was_requested(client, requested, total, free) -> None:
    assert await client.ask(m.BookieInfoRequest(1, requested)) == m.BookieInfoResponse(1, 0, total, free)


async def test_the_entries_of_a_ledger_are_listed(client) -> None:
    client.send(*[add(n, 1, entry_id) for n, entry_id in enumerate((0, 1, 3, 4))])
    await client.receive_all(4)
    answer = await client.ask(m.ListEntriesRequest(9, 1))
    assert answer == m.ListEntriesResponse(9, 0, 1, availability.encode([(0, 2), (3, 2)]))
    assert await client.ask(m.ListEntriesRequest(10, 2)) == m.ListEntriesResponse(10, Status.NO_LEDGER, 2)


async def test_auth_is_answered_as_disabled(client) -> None:
    answer = await client.ask(m.AuthRequest(1, "SomePlugin", b"token"))
    assert answer == m.AuthResponse(1, 0, "AuthDisabledPlugin", b"")


async def test_start_tls_is_refused(client) -> None:
    assert await client.ask(m.StartTlsRequest(1)) == m.StartTlsResponse(1, Status.BAD_REQUEST)


@pytest.mark.parametrize("operation", [3, 4, 12])
async def test_unknown_operations_are_a_bad_request_without_a_body(client, operation) -> None:
    client.send_hex(f"0a06080310{operation:02x}1801")
    assert (await client.receive_bytes()).hex() == f"0a06080310{operation:02x}1801109403"


async def test_old_versions_are_refused_in_the_operations_own_response(client) -> None:
    client.send_hex("0a06080210011801a2060408051006")
    assert await client.receive() == m.ReadResponse(1, Status.BAD_VERSION, 5, 6)
    client.send_hex("0a06080110021802aa0608080510061a002200")
    assert await client.receive() == m.AddResponse(2, Status.BAD_VERSION, 5, 6)


# --- long polls -------------------------------------------------------------------------------------------------------


def poll(txn_id: int, ledger_id: int, previous: int, timeout_ms: int | None = 60_000, **fields) -> m.ReadRequest:  # type: ignore[no-untyped-def]
    flag = fields.pop("flag", m.ReadFlag.ENTRY_PIGGYBACK)
    return m.ReadRequest(
        txn_id, ledger_id, fields.pop("entry_id", -1), flag=flag, previous_lac=previous, timeout_ms=timeout_ms
    )


async def test_a_long_poll_wakes_when_the_lac_advances(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    client.send(poll(2, 1, -1))
    await parked(bookie, 1)
    client.send(add(3, 1, 1, lac=0))
    answers = await client.receive_all(2)
    assert answers[2] == m.ReadResponse(2, 0, 1, 0, entry(1, 0), 0, 1_700_000_000_000)
    assert bookie.server.operations.long_polls == 0
    assert bookie.store.ledgers[1].watchers == []


async def parked(bookie, count: int) -> None:
    async with asyncio.timeout(30):
        while sum(len(ledger.watchers) for ledger in bookie.store.ledgers.values()) != count:
            await asyncio.sleep(0.001)


async def test_a_long_poll_that_times_out_has_no_body(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    assert await client.ask(poll(2, 1, -1, 30)) == m.ReadResponse(2, 0, 1, -1, None, -1)
    assert bookie.store.ledgers[1].watchers == [], "the watch is cancelled when the poll times out"


async def test_a_long_poll_without_timeout_does_not_wait(client) -> None:
    await client.ask(add(1, 1, 0))
    assert await client.ask(poll(2, 1, -1, None)) == m.ReadResponse(2, 0, 1, -1, None, -1)


async def test_a_long_poll_wakes_on_a_fence(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    client.send(poll(2, 1, -1))
    await parked(bookie, 1)
    client.send(fence(3, 1))
    assert (await client.receive_all(2))[2] == m.ReadResponse(2, 0, 1, -1, None, -1)


async def test_a_long_poll_whose_next_entry_is_on_other_bookies_has_no_body(client) -> None:
    client.send(add(1, 1, 1, lac=0))
    await client.receive()
    assert await client.ask(poll(2, 1, -1)) == m.ReadResponse(2, 0, 1, -1, None, 0, 1_700_000_000_000)


async def test_a_long_poll_with_an_entry_id_is_a_bad_request(client) -> None:
    await client.ask(add(1, 1, 0))
    assert await client.ask(poll(2, 1, -1, entry_id=5)) == m.ReadResponse(2, Status.BAD_REQUEST, 1, 5)


async def test_a_long_poll_of_an_unknown_ledger_is_answered_at_once(client) -> None:
    assert await client.ask(poll(1, 7, -1)) == m.ReadResponse(1, Status.NO_LEDGER, 7, -1)


async def test_a_long_poll_without_piggyback_reads_the_entry_it_names(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    client.send(poll(2, 1, -1, flag=0, entry_id=0))
    await parked(bookie, 1)
    client.send(add(3, 1, 1, lac=0))
    assert (await client.receive_all(2))[2] == m.ReadResponse(2, 0, 1, 0, entry(1, 0), 0)


async def test_long_polls_end_with_their_connection(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    client.send(poll(2, 1, -1), poll(3, 1, -1))
    await parked(bookie, 2)
    await client.close()
    await parked(bookie, 0)
    async with asyncio.timeout(30):
        while bookie.server.operations.long_polls:  # counted until a turn of the event loop after the watch has ended
            await asyncio.sleep(0.001)


async def test_long_polls_are_bounded(start_bookie) -> None:
    bookie = await start_bookie(long_polls_max=2)
    client = await bookie.connect()
    await client.ask(add(1, 1, 0))
    client.send(*(poll(n, 1, -1) for n in (2, 3, 4, 5)))
    assert await client.receive() == m.ReadResponse(5, Status.TOO_MANY_REQUESTS, 1, -1)
    assert await client.receive() == m.ReadResponse(2, 0, 1, -1, None, -1)


async def test_a_long_poll_never_waits_longer_than_the_limit(start_bookie) -> None:
    bookie = await start_bookie(long_poll_timeout_max_s=0.03)
    client = await bookie.connect()
    await client.ask(add(1, 1, 0))
    assert await client.ask(poll(2, 1, -1, 2**40)) == m.ReadResponse(2, 0, 1, -1, None, -1)


# --- read-only --------------------------------------------------------------------------------------------------------


async def test_a_read_only_bookie_refuses_writes_and_serves_reads(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    bookie.state.set_read_only("disk", "full")
    client.send(
        add(2, 1, 1), add(3, 1, 1, recovery=True), m.WriteLacRequest(4, 1, 0, KEY, b"p"), m.ReadRequest(5, 1, 0)
    )
    answers = await client.receive_all(4)
    assert [answers[n].status for n in (2, 3, 4, 5)] == [Status.READ_ONLY, Status.READ_ONLY, Status.READ_ONLY, 0]
    assert (await client.ask(fence(6, 1))).status == 0
    bookie.state.set_read_only("disk", None)
    assert (await client.ask(add(7, 2, 0))).status == 0


async def test_a_read_only_bookie_accepts_high_priority_adds_while_there_is_space(bookie, client) -> None:
    bookie.state.set_read_only("disk", "full")
    bookie.state.high_priority_writes = True
    client.send(add(1, 1, 0), add(2, 1, 1, priority=1), add(3, 1, 2, recovery=True, priority=100))
    answers = await client.receive_all(3)
    assert [answers[n].status for n in (1, 2, 3)] == [Status.READ_ONLY, 0, 0]
