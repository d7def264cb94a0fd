"""Run `python -m bindery_simulation` (see `command`).

Unless PYTHONHASHSEED is 0, the process sets it and starts again, so that a seed also determines the order of sets.
"""

import os
import sys

from bindery_simulation.command import main

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "bindery_simulation", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
