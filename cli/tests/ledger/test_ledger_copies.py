"""`bindery ledger compare` and `read` on a real cluster where copies are missing, damaged and different."""

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from bindery.common.operator import connected
from bindery.standalone.plan import BOOKIE_PORT, HOST
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, AddResponse
from command import bindery
from forked_cluster import ForkedCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

EARLY, LATE = 3, 4
"""Entries written while all three bookies are up, then while bookie-2 is down."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForkedCluster]:
    # No auditor, because it would restore the missing copies that these tests expect.
    with ForkedCluster(bookies=3, brokers=0, auditors=0) as running:
        yield running


def standalone(cluster: ForkedCluster, verb: str, bookie: str) -> None:
    done = bindery("standalone", verb, bookie, "--data", str(cluster.directory.root))
    assert done.returncode == 0, done.stderr


def ledger(cluster: ForkedCluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return bindery("ledger", *arguments, "--zookeeper", cluster.zookeeper)


def payload(number: int) -> bytes:
    return b"payload number %d, found on disk by these words" % number


async def write_while_a_bookie_is_away(cluster: ForkedCluster) -> int:
    async with connected(cluster.zookeeper) as found:
        client = found.client
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={"application": b"copies"})
        await writer.add_many([payload(number) for number in range(EARLY)])
        await asyncio.to_thread(standalone, cluster, "stop", "bookie-2")
        await writer.add_many([payload(EARLY + number) for number in range(LATE)])
        await writer.close()
        return int(writer.ledger_id)


def damage_on_disk(cluster: ForkedCluster, bookie: str, words: bytes) -> int:
    """Change the last byte of `words` everywhere in the files of the bookie. Return the number of occurrences."""
    count = 0
    for path in (cluster.directory.root / bookie).rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if words in data:
            count += data.count(words)
            path.write_bytes(data.replace(words, words[:-1] + bytes([words[-1] ^ 1])))
    return count


def plant(
    cluster: ForkedCluster, number: int, entry_id: int, content: bytes, *, lac: int, damage: bool = False
) -> None:
    """Add one entry to bookie-2 only, without the writer of the ledger."""
    digester = Digester(DigestType.CRC32C)
    length = sum(len(payload(i)) for i in range(entry_id + 1))
    body = pack(digester, ledger_id=number, entry_id=entry_id, lac=lac, length=length, payload=content)
    if damage:
        body = body[:-1] + bytes([body[-1] ^ 1])
    request = AddRequest(1, number, entry_id, digester.master_key, body, recovery=True)
    with socket.create_connection((HOST, BOOKIE_PORT + cluster.port_offset + 2), timeout=30) as connection:
        connection.sendall(v3.encode_request(request))
        decoder = FrameDecoder()
        while not (messages := decoder.feed(connection.recv(4096))):
            pass
    (answer,) = v3.decode_responses(messages)
    assert isinstance(answer, AddResponse)
    assert answer.status == 0


def rows(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_missing_damaged_and_different_copies_are_found_and_nothing_is_changed(cluster: ForkedCluster) -> None:
    number = asyncio.run(write_while_a_bookie_is_away(cluster))
    identity = str(number)
    last = EARLY + LATE - 1

    done = ledger(cluster, "compare", identity, "--json")
    assert (done.returncode, rows(done)[-1]["verdict"]) == (1, "incomplete"), done.stderr
    assert "bookie-2" in done.stderr
    standalone(cluster, "start", "bookie-2")

    before = ledger(cluster, "show", identity, "--json").stdout
    done = ledger(cluster, "compare", identity, "--json")
    assert done.returncode == 3, done.stderr
    *entries, summary = rows(done)
    assert [entry["words"] for entry in entries] == ["agree"] * EARLY + ["missing at bookie-2"] * LATE
    assert summary["bookies"]["bookie-2"] == {"good": EARLY, "absent": LATE}
    assert ledger(cluster, "compare", identity, "--last", str(EARLY - 1)).returncode == 0

    verdicts = [r["verdict"] for r in rows(ledger(cluster, "read", identity, "--from-bookie", "bookie-2", "--json"))]
    assert verdicts == ["good"] * EARLY + ["absent"] * LATE

    plant(cluster, number, EARLY, payload(EARLY), lac=-1, damage=True)
    plant(cluster, number, EARLY + 1, b"not what was written", lac=-1)
    plant(cluster, number, EARLY + 2, payload(EARLY + 2), lac=EARLY + 1)
    done = ledger(cluster, "compare", identity, "--json")
    assert done.returncode == 3, done.stderr
    verdicts = [entry["verdict"] for entry in rows(done)[:-1]]
    assert verdicts == ["agree"] * EARLY + ["corrupt", "diverged", "agree", "missing"]
    raw = ledger(
        cluster, "read", identity, "--raw", "--first", str(EARLY), "--last", str(EARLY), "--payload", "escaped"
    )
    assert raw.returncode == 3
    assert f"entry {EARLY} of bookie-2: corrupt (entry digest mismatch)" in raw.stdout
    assert "found on disk by these wordr" in raw.stdout
    assert " WRONG, its bytes give " in raw.stdout

    standalone(cluster, "stop", "bookie-1")
    assert damage_on_disk(cluster, "bookie-1", payload(1)) >= 1
    standalone(cluster, "start", "bookie-1")
    done = ledger(cluster, "compare", identity, "--only-bad", "--last", str(EARLY - 1))
    assert done.returncode == 1, done.stdout  # the bookie detects the damage and does not send the entry
    assert "error at bookie-1" in done.stdout
    assert "bookie-1: bookie answers IO_ERROR (1 entries)" in done.stderr

    # A verified read skips damaged copies. It does not detect divergence, so it may return either copy of EARLY + 1.
    for first, end in ((0, EARLY), (EARLY + 2, last)):
        plain = ledger(cluster, "read", identity, "--bytes", "--first", str(first), "--last", str(end))
        assert plain.stdout.encode() == b"".join(map(payload, range(first, end + 1)))
    assert ledger(cluster, "show", identity, "--json").stdout == before


def test_an_open_ledger_is_compared_without_fencing_its_writer(cluster: ForkedCluster) -> None:
    async def compare_while_writing() -> "subprocess.CompletedProcess[str]":
        async with connected(cluster.zookeeper) as found:
            client = found.client
            writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
            await writer.add_many([payload(number) for number in range(20)])
            done = await asyncio.to_thread(ledger, cluster, "compare", str(writer.ledger_id), "--last", "29", "--json")
            await writer.add(b"still mine")
            await writer.close()
            return done

    done = asyncio.run(compare_while_writing())
    assert done.returncode == 0, done.stdout + done.stderr
    *entries, summary = rows(done)
    assert summary["state"] == "open"
    assert summary["agree"] + summary["unacknowledged"] == len(entries) == 30
    assert entries[25]["verdict"] == "unacknowledged"
