"""`python -m bindery_simulation service|protocol|storage ...`: play seeds.

Runs under PYTHONHASHSEED=0, whatever the caller's is, so that a seed is a history also where a set is walked through.
"""

import importlib
import os
import sys

COMMANDS = {
    "protocol": "bindery_simulation.protocol.command",
    "service": "bindery_simulation.service.command",
    "storage": "bindery_simulation.storage.command",
}
"""Sub-command -> module with `main(argv) -> exit code`."""


def main() -> int:
    """Hand over to the sub-command."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m bindery_simulation {'|'.join(sorted(COMMANDS))} ...", file=sys.stderr)
        return 2
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "bindery_simulation", *sys.argv[1:]])
    return int(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
