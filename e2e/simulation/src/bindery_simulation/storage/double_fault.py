"""Cut an entry log exactly between two records, and remove the index.

Each fault alone is detected: the index points beyond the cut, and the logs have the content of the index. Together they
are detected only by the recorded end of the log. The entries beyond the cut are promised like all others.
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
    """Damage one log of the bookie in `directory`. None: no log has a record, and nothing was changed."""
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
