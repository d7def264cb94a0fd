"""Double fault: an entry log is cut exactly between two records, and the index is lost.

Each alone shows by itself: the index points behind the cut, and a log holds what the index held. Together only what is
known of the log's end tells that something is missing. The entries behind the cut are promised as all others are.
"""

import os
import random
import shutil
from typing import Final

from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.io.disk import RealDisk

from bindery_simulation.storage.harm import Harm

CUT_AND_INDEX_LOST: Final = "cut between records, index lost"


def cut_and_lose_index(directory: str, rng: random.Random) -> Harm | None:
    """Do so to one log of the bookie in `directory`; None, and nothing done, if none has a record."""
    current = "ledgers/current"
    scanner = EntryLogScanner(RealDisk(), os.path.join(directory, current))
    for log_id in rng.sample(scanner.log_ids(), len(scanner.log_ids())):
        found = [one for one in scanner.scan(log_id) if isinstance(one, LogRecord)]
        if not found:
            continue
        ends = [found[0].offset - 8, *(record.offset + len(record.body) for record in found)]
        size, cut = scanner.size(log_id), rng.choice(ends)
        os.truncate(scanner.path(log_id), cut)
        shutil.rmtree(os.path.join(directory, current, "index"))
        path = os.path.relpath(scanner.path(log_id), directory)
        told = f"{path}: cut between records to {cut} of {size}, and the index removed"
        return Harm(CUT_AND_INDEX_LOST, path, cut, size, told)
    return None
