"""`python -m bindery_bookie`: the same as `bindery-bookie`.

The garbage collector rests while the modules are imported: it would look through them again and again, a tenth of the
start, and find nothing. What is there afterwards stays for good, so it never looks at it again either.
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
