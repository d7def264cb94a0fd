"""Ledgers and the cluster over HTTP: BookKeeper's responses and pages, with a real client and a real bookie."""

import json
import random

import pytest
from bindery_bookie.admin.cluster_routes import _bytes
from bindery_bookie.admin.shared_client import SharedClient
from bindery_client.client import LedgerClient
from bindery_core.errors import BookieUnavailable, LedgerFenced, MetadataUnavailable, NoSuchLedger
from bindery_core.formats import bookie_service_info
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId
from bindery_metadata.layout.layout import LedgersLayout

LAYOUT = LedgersLayout()
LEDGER = "/api/v1/ledger"
BOOKIE = "/api/v1/bookie"


def metadata(**changes):  # type: ignore[no-untyped-def]
    fields = {
        "ensemble_size": 2,
        "write_quorum": 2,
        "ack_quorum": 1,
        "segments": (Segment(0, ("b0", "b1")),),
        "password": b"pw",
        "ctime_ms": 1_700_000_000_000,
    }
    return LedgerMetadata(**{**fields, **changes})


@pytest.fixture
async def cluster(make_admin, start_bookie):  # type: ignore[no-untyped-def]
    """A running bookie, registered, and the admin API beside it."""
    bookie = await start_bookie()
    clients = []

    async def connect():  # type: ignore[no-untyped-def]
        clients.append(await LedgerClient.connect(made.metadata, randomness=random.Random(4), layout=LAYOUT))
        return clients[-1]

    shared = SharedClient(connect)
    made = make_admin(ledger_client=shared.get)
    await made.initialize()
    info = bookie_service_info.of_bookie(host="127.0.0.1", port=bookie.port, http_port=1)
    path = LAYOUT.bookie(BookieId("bookie-0"), read_only=False)
    await made.metadata.create(path, bookie_service_info.encode(info), make_parents=True)
    made.bookie, made.clients, made.client_of, made.shared = bookie, clients, connect, shared
    yield made
    for client in clients:
        await client.close()


async def write(cluster, payloads):  # type: ignore[no-untyped-def]
    client = await cluster.client_of()
    writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1, password=b"secret")
    if payloads:
        await writer.add_many(payloads)
    return writer


# --- metadata -------------------------------------------------------------------------------------------------------


async def test_metadata_has_bookkeepers_members(admin) -> None:
    closed = metadata(
        state=LedgerState.CLOSED,
        last_entry_id=6,
        length=70,
        digest_type=DigestType.CRC32C,
        custom={"application": b"pulsar"},
        segments=(Segment(0, ("b0", "b1")), Segment(5, ("b0", "b2"))),
    )
    ledger_id, stored = await admin.manager.create(closed)
    answer = await admin.http.get(f"{LEDGER}/metadata?ledger_id={ledger_id}")
    assert answer.json() == {
        str(ledger_id): {
            "ledgerId": ledger_id,
            "metadataFormatVersion": 3,
            "ensembleSize": 2,
            "writeQuorumSize": 2,
            "ackQuorumSize": 1,
            "state": "CLOSED",
            "length": 70,
            "lastEntryId": 6,
            "ctime": 1_700_000_000_000,
            "digestType": "CRC32C",
            "password": "cHc=",
            "customMetadata": {"application": "cHVsc2Fy"},
            "closed": True,
            "allEnsembles": {"0": [{"id": "b0"}, {"id": "b1"}], "5": [{"id": "b0"}, {"id": "b2"}]},
            "ctoken": stored.value.c_token,
        }
    }
    answer = await admin.http.get(f"{LEDGER}/metadata?ledger_id=999")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_such_ledger")
    assert (await admin.http.get(f"{LEDGER}/metadata")).json()["facts"] == {"parameter": "ledger_id"}


async def test_a_ledger_without_creation_time_has_that_of_its_znode(admin) -> None:
    ledger_id, _ = await admin.manager.create(metadata(ctime_ms=None))
    stat = await admin.metadata.exists(LAYOUT.ledger(ledger_id))
    assert stat.ctime_ms > 0
    shown = (await admin.http.get(f"{LEDGER}/metadata?ledger_id={ledger_id}")).json()[str(ledger_id)]
    assert shown["ctime"] == stat.ctime_ms
    listed = (await admin.http.get(f"{LEDGER}/list?print_metadata=true")).json()[str(ledger_id)]
    assert listed["ctime"] == stat.ctime_ms


async def test_lists_are_ids_alone_or_pages_with_metadata(admin) -> None:
    ids = [(await admin.manager.create(metadata()))[0] for _ in range(203)]
    assert (await admin.http.get(f"{LEDGER}/list")).json() == dict.fromkeys(map(str, ids))
    assert (await admin.http.get(f"{LEDGER}/list?page=1")).json() == dict.fromkeys(map(str, ids))
    pages = [(await admin.http.get(f"{LEDGER}/list?print_metadata=true&page={page}")).json() for page in (1, 2, 3, 4)]
    assert [len(page) for page in pages] == [99, 100, 4, 0]
    assert [int(one) for page in pages for one in page] == ids
    assert pages[2][str(ids[-1])]["ensembleSize"] == 2
    everything = (await admin.http.get(f"{LEDGER}/list?print_metadata=true")).json()
    assert [int(one) for one in everything] == ids
    text = (await admin.http.get(f"{LEDGER}/list?print_metadata=true&decode_meta=false&page=3")).json()[str(ids[-1])]
    assert text.startswith("BookieMetadataFormatVersion\t3\n")
    assert (await admin.http.get(f"{LEDGER}/list?print_metadata=yes")).status_code == 400


async def test_an_empty_list_is_an_empty_object(admin) -> None:
    assert (await admin.http.get(f"{LEDGER}/list")).json() == {}


async def test_unreadable_metadata_does_not_hide_other_ledgers(admin) -> None:
    first, _ = await admin.manager.create(metadata())
    second, _ = await admin.manager.create(metadata())
    await admin.metadata.set(LAYOUT.ledger(first), b"rubbish", version=None)
    listed = (await admin.http.get(f"{LEDGER}/list?print_metadata=true")).json()
    assert set(listed[str(first)]) == {"error"}
    assert listed[str(second)]["ledgerId"] == second


async def test_an_unavailable_metadata_store_is_a_503_and_not_an_empty_list(admin) -> None:
    await admin.manager.create(metadata())
    for path in (f"{LEDGER}/list", f"{BOOKIE}/cluster_info", f"{BOOKIE}/list_bookies"):
        admin.metadata.fail_next(MetadataUnavailable("away"))
        answer = await admin.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (503, "metadata_unavailable"), path


# --- entries --------------------------------------------------------------------------------------------------------


async def test_entries_are_read_as_ascii_in_pages(cluster) -> None:
    writer = await write(cluster, [f"entry {at}".encode() for at in range(1005)] + [b"\xff\x00z"])
    await writer.close()
    path = f"{LEDGER}/read?ledger_id={writer.ledger_id}"
    everything = (await cluster.http.get(path)).json()
    assert list(everything) == [str(at) for at in range(1006)]
    assert (everything["3"], everything["1005"]) == ("entry 3", "\ufffd\x00z")
    assert list((await cluster.http.get(f"{path}&start_entry_id=4&end_entry_id=6")).json()) == ["4", "5", "6"]
    first = (await cluster.http.get(f"{path}&page=1")).json()
    assert (first.pop("Entries for page: "), len(first)) == ("1", 1000)
    second = (await cluster.http.get(f"{path}&page=2")).json()
    assert list(second) == ["Entries for page: ", *(str(at) for at in range(1000, 1006))]
    for wrong in ("&start_entry_id=5&end_entry_id=4", "&page=2&end_entry_id=7", "&start_entry_id=-1"):
        assert (await cluster.http.get(path + wrong)).status_code == 400, wrong
    assert (await cluster.http.get(f"{path}&start_entry_id=5000")).json() == {}


async def test_an_open_ledger_is_read_without_closing_it(cluster) -> None:
    writer = await write(cluster, [b"a"])
    await writer.add(b"b")  # this add carries the LAC, which confirms the first entry
    found = (await cluster.http.get(f"{LEDGER}/read?ledger_id={writer.ledger_id}")).json()
    assert found in ({"0": "a"}, {"0": "a", "1": "b"}), "the writer also sends its LAC on its own"
    await writer.add(b"c")
    assert (await writer.close()).last_entry_id == 2
    assert cluster.bookie.store.ledgers[writer.ledger_id].fenced is False


async def test_reading_a_missing_ledger_is_a_404(cluster) -> None:
    assert (await cluster.http.get(f"{LEDGER}/read?ledger_id=77")).status_code == 404


async def test_a_deleted_ledger_was_fenced_first(cluster) -> None:
    writer = await write(cluster, [b"a"])
    answer = await cluster.http.request("DELETE", f"{LEDGER}/delete?ledger_id={writer.ledger_id}")
    assert answer.json() == f"Deleted ledger: {writer.ledger_id}"
    with pytest.raises(NoSuchLedger):
        await cluster.manager.read(writer.ledger_id)
    with pytest.raises((LedgerFenced, BookieUnavailable)):
        await writer.add(b"b")
    answer = await cluster.http.request("DELETE", f"{LEDGER}/delete?ledger_id={writer.ledger_id}")
    assert answer.status_code == 404
    assert (await cluster.http.get(f"{LEDGER}/delete?ledger_id=1")).status_code == 405


async def test_the_client_is_created_once_and_closed_with_the_bookie(cluster) -> None:
    writer = await write(cluster, [b"a"])
    before = len(cluster.clients)
    for _ in range(3):
        await cluster.http.get(f"{LEDGER}/read?ledger_id={writer.ledger_id}")
    assert len(cluster.clients) == before + 1
    await cluster.shared.close()
    await cluster.shared.close()
    answer = await cluster.http.get(f"{LEDGER}/read?ledger_id={writer.ledger_id}")
    assert answer.status_code == 503


# --- the cluster ----------------------------------------------------------------------------------------------------


async def test_bookies_are_listed_by_mode_with_their_hosts(cluster) -> None:
    assert (await cluster.http.get(f"{BOOKIE}/list_bookies")).json() == {"bookie-0": None}
    answer = await cluster.http.get(f"{BOOKIE}/list_bookies?type=rw&print_hostnames=true")
    assert answer.json() == {"bookie-0": "127.0.0.1"}
    assert (await cluster.http.get(f"{BOOKIE}/list_bookies?type=ro")).json() == {}
    assert (await cluster.http.get(f"{BOOKIE}/list_bookies?type=all")).status_code == 400


async def test_the_disk_space_of_every_bookie_is_listed(cluster) -> None:
    cluster.bookie.store.usage = (2_500_000_000, 1234)
    assert (await cluster.http.get(f"{BOOKIE}/list_bookie_info")).json() == {
        "bookie-0": ": {Free: 1234(1.234KB), Total: 2500000000(2.5GB)},",
        "ClusterInfo: ": "{Free: 1234(1.234KB), Total: 2500000000(2.5GB)}",
    }
    await cluster.bookie.server.close()
    assert (await cluster.http.get(f"{BOOKIE}/list_bookie_info")).status_code == 404


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1000(1KB)"),
        (1999999, "1999999(1.999MB)"),
        (5 * 10**16, f"{5 * 10**16}(50000TB)"),
    ],
)
def test_sizes_are_formatted_as_in_bookkeeper(number, text) -> None:
    assert _bytes(number) == text


async def test_cluster_info_counts_bookies_and_reports_the_auditor_and_marks(admin) -> None:
    base = {
        "auditorElected": False,
        "auditorId": "",
        "clusterUnderReplicated": False,
        "ledgerReplicationEnabled": True,
        "totalBookiesCount": 0,
        "writableBookiesCount": 0,
        "readonlyBookiesCount": 0,
        "unavailableBookiesCount": 0,
    }
    assert (await admin.http.get(f"{BOOKIE}/cluster_info")).json() == base
    for path, data in (
        (LAYOUT.cookie(BookieId("b0")), b"x"),
        (LAYOUT.cookie(BookieId("b1")), b"x"),
        (LAYOUT.cookie(BookieId("b2")), b"x"),
        (LAYOUT.bookie(BookieId("b0"), read_only=False), b""),
        (LAYOUT.bookie(BookieId("b1"), read_only=True), b""),
        (f"{LAYOUT.auditor_election}/V_0000000012", b'bookieId: "b1"\n'),
        (f"{LAYOUT.auditor_election}/V_0000000011", b'bookieId:  "b0"'),
        (LAYOUT.mark(5), b'replica: "b2"\n'),
        (LAYOUT.replication_disabled, b""),
    ):
        await admin.metadata.create(path, data, make_parents=True)
    assert json.loads((await admin.http.get(f"{BOOKIE}/cluster_info")).text) == {
        **base,
        "auditorElected": True,
        "auditorId": "b0",
        "clusterUnderReplicated": True,
        "ledgerReplicationEnabled": False,
        "totalBookiesCount": 3,
        "writableBookiesCount": 1,
        "readonlyBookiesCount": 1,
        "unavailableBookiesCount": 1,
    }
    await admin.metadata.delete(LAYOUT.mark(5), version=None)
    assert (await admin.http.get(f"{BOOKIE}/cluster_info")).json()["clusterUnderReplicated"] is False
