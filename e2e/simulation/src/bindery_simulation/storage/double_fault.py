"""Cut an entry log exactly between two records, and remove the index.

Each fault alone is detected or repaired: the index points beyond the cut, and a lost index is rebuilt from the logs.
Both together are detected only because the end of each log is recorded. Acknowledged entries beyond the cut are checked
like all others.
"""

import os
import random
import shutil
from typing import Final

from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.io.disk import RealDisk

from bindery_simulation.storage.harm import Harm

CUT_AND_INDEX_LOST: Final = "cut between records, index lost"
"""Kind of this damage."""


def cut_and_lose_index(directory: str, rng: random.Random) -> Harm | None:
    """Cut one log of the bookie in `directory` and remove the index. None: no log has a record; nothing was changed."""
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
        text = f"{path}: cut between records to {cut} of {size}, and the index removed"
        return Harm(CUT_AND_INDEX_LOST, path, cut, size, text)
    return None
