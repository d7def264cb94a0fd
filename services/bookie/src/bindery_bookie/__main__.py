"""`python -m bindery_bookie`: the same as `bindery-bookie`.

Python's garbage collector is off during the imports: it would scan the modules repeatedly, for a tenth of the start
time, and find nothing. The objects that exist afterwards are permanent, so they are frozen and never scanned again.
"""

import bindery_kit.process.early_end  # first

# isort: split
import gc
import sys

gc.disable()
import bindery_kit.lean_imports  # noqa: E402, F401 - before what it makes lean

from bindery_bookie.main import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main())
