"""Measure the CPU time of the ledger writer: packing, sending, responses, confirmation. No network, no disk.

Measured: LedgerWriter.add_many and receive_many, one batch in flight, all bookies answering at once and in order.
Run: `.venv/bin/python bench/ledger_writer.py`.
"""

import statistics
import time

from bindery_core.digest import Digester
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import SendAdds
from bindery_core.ledger.ledger_writer import LedgerWriter
from bindery_core.wire.messages import AddResponse

ENTRY_COUNT = 100_000
ROUNDS = 5


def run(*, ensemble_size: int, write_quorum: int, batch: int, payload: bytes) -> tuple[float, float]:
    """Microseconds per entry in add_many, and per entry and bookie in receive_many."""
    names = tuple(BookieId(f"b{i}") for i in range(ensemble_size))
    metadata = LedgerMetadata(
        ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=2, segments=(Segment(EntryId(0), names),)
    )
    writer = LedgerWriter(LedgerId(7), metadata, digester=Digester(DigestType.CRC32C))
    adding = receiving = 0.0
    payloads = [payload] * batch
    for _ in range(ENTRY_COUNT // batch):
        began = time.perf_counter()
        actions = writer.add_many(payloads, now=0.0)
        adding += time.perf_counter() - began
        answers = [
            (action.bookie_id, [AddResponse(0, 0, 7, entry_id) for entry_id in action.entry_ids])
            for action in actions
            if isinstance(action, SendAdds)
        ]
        began = time.perf_counter()
        for bookie_id, responses in answers:
            writer.receive_many(bookie_id, responses, now=0.0)
        receiving += time.perf_counter() - began
    assert writer.lac == writer.next_entry_id - 1
    entries = writer.next_entry_id
    return adding / entries * 1e6, receiving / entries / write_quorum * 1e6


def main() -> None:
    print(f"{ENTRY_COUNT} entries, median of {ROUNDS} rounds (minimum .. maximum), microseconds")
    print(f"{'E/Qw':>5} {'batch':>6} {'payload':>8} {'add per entry':>24} {'response per entry, bookie':>26}")
    for ensemble_size, write_quorum in ((3, 3), (4, 3)):
        for batch in (1, 32, 256, 1_000):
            for size in (128, 1_024):
                results = [
                    run(ensemble_size=ensemble_size, write_quorum=write_quorum, batch=batch, payload=bytes(size))
                    for _ in range(ROUNDS)
                ]
                adds, answers = zip(*results, strict=True)
                print(
                    f"{ensemble_size}/{write_quorum:<3} {batch:>6} {size:>8} "
                    f"{statistics.median(adds):>9.2f} ({min(adds):.2f} .. {max(adds):.2f}) "
                    f"{statistics.median(answers):>9.2f} ({min(answers):.2f} .. {max(answers):.2f})"
                )


if __name__ == "__main__":
    main()
