"""`bookkeeper shell` on clusters with Bindery's bookies, and the `bindery` command on clusters with Apache's."""

import asyncio
import json
import re

import pytest
from bindery_core.formats.cookie import parse

from e2e.interop.actors import Actor, Handle
from e2e.interop.clusters import Bookie, Cluster, Clusters, our_client, run_cli
from e2e.interop.conftest import TOOL_TABLE
from e2e.interop.java import Refused, write_conf
from e2e.interop.table import Table

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]

everywhere = pytest.mark.parametrize("cluster", ["bindery", "mixed", "apache"], indirect=True)
"""Clusters of the shell tests. Apache's own bookies show the expected behaviour."""
on_theirs = pytest.mark.parametrize("cluster", ["apache", "mixed"], indirect=True)

Actors = dict[tuple[str, str], Actor]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, clusters: Clusters) -> Cluster:
    return clusters[request.param]


@pytest.fixture
def table_place(cluster: Cluster) -> tuple[Table, str, list[str]]:
    return TOOL_TABLE, cluster.name, []


async def written(actor: Actor, *, entries: int = 5, custom: dict[str, str] | None = None) -> Handle:
    """A closed ledger."""
    writer = await actor.create(custom=custom)
    await writer.add(entries)
    await writer.close()
    return writer


async def said(clusters: Clusters, cluster: Cluster, *words: str) -> str:
    """Output of a shell command, which must succeed."""
    status, text = await clusters.driver.shell(cluster.shell_conf, *words)
    assert status == 0, text
    return text


# -- Apache's tools ----------------------------------------------------------------------------------------------------


@everywhere
async def test_listbookies(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell listbookies -rw`"""
    text = await said(clusters, cluster, "listbookies", "-rw")
    for bookie in cluster.bookies:
        assert f"BookieID:{bookie.id}, IP:127.0.0.1, Port:{bookie.process.port}" in text


@everywhere
async def test_bookieinfo(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell bookieinfo`"""
    text = await said(clusters, cluster, "bookieinfo")
    for bookie in cluster.bookies:
        found = re.search(rf"BookieID:{re.escape(bookie.id)},.*Free: (\d+)\(.*Total: (\d+)\(", text)
        assert found is not None, text
        assert 0 < int(found[1]) < int(found[2])


@everywhere
async def test_endpointinfo(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell endpointinfo`"""
    for bookie in cluster.bookies:
        text = await said(clusters, cluster, "endpointinfo", "-b", bookie.id)
        assert "Protocol: bookie-rpc" in text
        assert f"Address: 127.0.0.1 : {bookie.process.port}" in text


@everywhere
async def test_listledgers(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`bookkeeper shell listledgers -meta`"""
    ledger = (await written(actors["bindery v3", cluster.name])).ledger
    text = await said(clusters, cluster, "listledgers", "-meta")
    lines = text.splitlines()
    metadata = lines[lines.index(f"ledgerID: {ledger}") + 1]
    assert "state=CLOSED" in metadata
    assert "lastEntryId=4" in metadata


@everywhere
async def test_ledgermetadata(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`bookkeeper shell ledgermetadata`"""
    ledger = (await written(actors["bindery v3", cluster.name], custom={"application": "interop"})).ledger
    text = await said(clusters, cluster, "ledgermetadata", "-ledgerid", str(ledger))
    for words in (
        "formatVersion=3",
        "ensembleSize=3, writeQuorumSize=3, ackQuorumSize=2",
        "state=CLOSED",
        "lastEntryId=4",
        "digestType=CRC32C",
        "customMetadata={application=",
    ):
        assert words in text, text


@everywhere
async def test_readledger(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`bookkeeper shell readledger`, also with forced recovery"""
    writer = await written(actors["bindery v3", cluster.name])
    words = ("readledger", "-ledgerid", str(writer.ledger))
    for more in ((), ("-r",)):
        text = await said(clusters, cluster, *words, *more)
        assert re.findall(r"Eid=(\d+)", text) == ["0", "1", "2", "3", "4"], text
        assert "Failed" not in text


@everywhere
async def test_simpletest(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell simpletest`"""
    words = ("-ensemble", "3", "-writeQuorum", "3", "-ackQuorum", "2", "-numEntries", "100")
    assert "100 entries written to ledger" in await said(clusters, cluster, "simpletest", *words)


@everywhere
async def test_bookiesanity(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell bookiesanity` of one bookie"""
    bookie = cluster.bookies[0]
    conf = cluster.directory / "sanity.conf"
    write_conf(
        conf,
        {
            "metadataServiceUri": cluster.uri,
            "allowLoopback": "true",
            "advertisedAddress": "127.0.0.1",
            "bookiePort": str(bookie.process.port),
        },
    )
    status, text = await clusters.driver.shell(conf, "bookiesanity", "-entries", "20")
    assert status == 0, text


@everywhere
async def test_instance_id(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell whatisinstanceid`, the same as Bindery's tool"""
    facts = json.loads(await run_cli("cluster", "init", "--json", "--zookeeper", cluster.zookeeper))
    assert facts["instance_id"] in await said(clusters, cluster, "whatisinstanceid")


@everywhere
async def test_cookies(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell cookie_get` of every bookie"""
    for bookie in cluster.bookies:
        text = await said(clusters, cluster, "cookie_get", bookie.id)
        assert f'bookieHost: "{bookie.id}"' in text
        assert "instanceId:" in text
    await _several_directories(clusters, cluster)


async def _several_directories(clusters: Clusters, cluster: Cluster) -> None:
    """Bindery's cookie with several directories equals the one that Apache's shell generates."""
    place = cluster.directory / "several"
    journals, ledgers = ([str(place / f"{kind}{n}") for n in range(2)] for kind in ("journal", "ledger"))
    theirs = place / "cookie"
    place.mkdir()
    await said(clusters, cluster, "cookie_generate", "-j", ",".join(journals), "-l", ",".join(ledgers),
               "-o", str(theirs), "several:3181")  # fmt: skip
    identity = ["--zookeeper", cluster.zookeeper, "--ledgers-root", cluster.root, "--bookie-id", "several:3181",
                "--journal-dir", ",".join(journals), "--ledger-dir", ",".join(ledgers)]  # fmt: skip
    await run_cli("bookie", "cookie", "adopt", *identity, "--yes")
    try:
        ours = (place / "journal1" / "current" / "VERSION").read_bytes()
        assert parse(theirs.read_bytes()) == parse(ours)
        text = await said(clusters, cluster, "cookie_get", "several:3181")
        assert f'journalDir: "{",".join(journals)}"' in text
        listed = r"\t".join(["2", *ledgers])
        assert f'ledgerDirs: "{listed}"' in text
    finally:
        await run_cli("bookie", "cookie", "retire", *identity)


@everywhere
async def test_deleteledger(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`bookkeeper shell deleteledger`"""
    writer = await written(actors["bindery v3", cluster.name])
    await said(clusters, cluster, "deleteledger", "-ledgerid", str(writer.ledger), "-f")
    with pytest.raises(Exception, match="NoSuchLedger"):
        await actors["bindery v3", cluster.name].open(writer.ledger)


@everywhere
async def test_recover(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`bookkeeper shell recover`: copies a ledger from one bookie to another"""
    bookie = cluster.bookies[0]
    client = actors["bindery v3", cluster.name]
    writer = await _over(client, bookie)
    await writer.add(20)
    await writer.close()
    before = (await client.metadata(writer.ledger))["segments"][0]["ensemble"]
    await said(clusters, cluster, "recover", "-f", "-l", str(writer.ledger), bookie.id)
    after = (await client.metadata(writer.ledger))["segments"][0]["ensemble"]
    assert bookie.id not in after
    (new,) = set(after) - set(before)
    text = await run_cli(
        "ledger", "read", str(writer.ledger), "--from-bookie", new, "--json", "--zookeeper", cluster.zookeeper
    )
    assert len([line for line in text.splitlines() if '"good"' in line]) == 20, text


@everywhere
async def test_clusterinfo(clusters: Clusters, cluster: Cluster) -> None:
    """`bookkeeper shell clusterinfo`"""
    text = await said(clusters, cluster, "clusterinfo")
    facts = json.loads(text[text.index("{") :])
    assert (facts["totalBookiesCount"], facts["writableBookiesCount"]) == (4, 4)


# -- Bindery's tools ---------------------------------------------------------------------------------------------------


@on_theirs
async def test_our_ledger_list(cluster: Cluster, actors: Actors) -> None:
    """`bindery ledger list`"""
    writer = await written(actors["java v3", cluster.name])
    text = await run_cli("ledger", "list", "--json", "--zookeeper", cluster.zookeeper)
    facts = {line["ledger_id"]: line for line in map(json.loads, text.splitlines())}[writer.ledger]
    assert (facts["state"], facts["last_entry_id"], facts["length"]) == ("closed", 4, 510)


@on_theirs
async def test_our_ledger_show(cluster: Cluster, actors: Actors) -> None:
    """`bindery ledger show`"""
    writer = await written(actors["java v3", cluster.name], custom={"application": "interop"})
    text = await run_cli("ledger", "show", str(writer.ledger), "--json", "--zookeeper", cluster.zookeeper)
    facts = json.loads(text)
    expected = (await actors["java v3", cluster.name].metadata(writer.ledger))["segments"]
    assert facts["custom"] == {"application": "interop"}
    assert [(s["first_entry_id"], s["ensemble"]) for s in facts["segments"]] == [
        (s["first"], s["ensemble"]) for s in expected
    ]


@on_theirs
async def test_our_ledger_read(cluster: Cluster, actors: Actors) -> None:
    """`bindery ledger read`, also `--from-bookie`"""
    writer = await written(actors["java v3", cluster.name])
    words = ("ledger", "read", str(writer.ledger), "--json", "--zookeeper", cluster.zookeeper)
    ensemble = (await actors["java v3", cluster.name].metadata(writer.ledger))["segments"][0]["ensemble"]
    for more in ((), *(("--from-bookie", bookie) for bookie in ensemble)):
        lines = [json.loads(line) for line in (await run_cli(*words, *more)).splitlines()]
        assert [line["entry_id"] for line in lines] == [0, 1, 2, 3, 4]
        assert all(line.get("verdict", "good") == "good" for line in lines)


@on_theirs
async def test_our_init_of_their_cluster(cluster: Cluster) -> None:
    """`bindery cluster init` after `initnewcluster`: keeps LAYOUT and INSTANCEID"""
    facts = json.loads(await run_cli("cluster", "init", "--json", "--zookeeper", cluster.zookeeper))
    for name in ("LAYOUT", "INSTANCEID", "available"):
        assert f"/ledgers/{name}" in facts["found"]


@pytest.mark.parametrize("cluster", ["bindery"], indirect=True)
async def test_their_init_of_our_cluster(clusters: Clusters, cluster: Cluster) -> None:
    """`initnewcluster` after `bindery cluster init`: refused, as after `initnewcluster`"""
    for name in ("bindery", "apache"):
        status, _ = await clusters.driver.shell(clusters[name].shell_conf, "initnewcluster")
        assert status == 1


@pytest.mark.parametrize("cluster", ["bindery"], indirect=True)
async def test_their_bookie_joins_our_cluster(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """an Apache bookie joins a cluster that `bindery cluster init` created"""
    guest = clusters.add_bookie(cluster, "apache")
    try:
        guest.process.start()
        await guest.process.serving()
        java = actors["java v3", cluster.name]
        while guest.id not in (await java.bookies())["writable"]:  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
        async with our_client() as connect:
            assert (await (await connect(cluster.zookeeper)).list_bookies())[guest.id]  # type: ignore[index]
        for actor in (java, actors["bindery v3", cluster.name]):
            writer = await actor.create(e=5, qw=5, qa=5)
            await writer.add(10)
            await writer.close()
            assert guest.id in (await actor.metadata(writer.ledger))["segments"][0]["ensemble"]
        assert f'bookieHost: "{guest.id}"' in await said(clusters, cluster, "cookie_get", guest.id)
    finally:
        guest.process.kill()
        cluster.bookies.remove(guest)


@pytest.mark.parametrize("cluster", ["bindery", "mixed"], indirect=True)
async def test_read_only_bookie(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`bookkeeper shell listbookies -ro`; Apache's client places no new ledger on Bindery's bookie with a full disk"""
    full = clusters.add_bookie(
        cluster, "bindery", options=("--disk-usage-max", "0.000002", "--disk-usage-low", "0.000001")
    )
    try:
        full.process.start()
        await full.process.serving()
        java = actors["java v3", cluster.name]
        while full.id not in (await java.bookies())["read_only"]:  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
        assert f"BookieID:{full.id}" in await said(clusters, cluster, "listbookies", "-ro")
        writable = (await java.bookies())["writable"]  # type: ignore[attr-defined]
        assert full.id not in writable
        with pytest.raises(Refused, match="NotEnoughBookies"):
            await java.create(e=len(writable) + 1, qw=3, qa=2)
    finally:
        full.process.kill()
        cluster.bookies.remove(full)


async def _over(actor: Actor, bookie: Bookie) -> Handle:
    for _ in range(200):
        writer = await actor.create()
        if bookie.id in (await actor.metadata(writer.ledger))["segments"][0]["ensemble"]:
            return writer
    raise AssertionError("the bookie is in no ensemble")
