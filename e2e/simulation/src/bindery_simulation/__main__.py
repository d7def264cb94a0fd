"""`python -m bindery_simulation`: see `command`.

The process replaces itself unless PYTHONHASHSEED is 0, so that a seed determines the order of sets too.
"""

import os
import sys

from bindery_simulation.command import main

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "bindery_simulation", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
