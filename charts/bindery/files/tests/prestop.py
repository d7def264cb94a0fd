"""Run a bookie's preStop hook as the bookie would, check that the bookie is then in maintenance, and end that.

Environment: BOOKIE_BOOKIE_ID, BOOKIE_ZOOKEEPER, BINDERY_ZOOKEEPER. The bookie itself is not affected: it is only in
maintenance for a few seconds. If an operator set another membership for it, such as draining, the test does nothing.
"""

import json
import os
import subprocess
import sys
from typing import Any


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        sys.exit(f"test failed: {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def intent_of(bookie_id: str) -> dict[str, Any]:
    members = [json.loads(line) for line in run("bindery", "bookie", "members", "--json").splitlines()]
    for member in members:
        if member["bookie_id"] == bookie_id:
            return dict(member)
    return sys.exit(f"test failed: {bookie_id} is no member; there are {[member['bookie_id'] for member in members]}")


def main() -> None:
    bookie_id = os.environ["BOOKIE_BOOKIE_ID"]
    before = intent_of(bookie_id)
    if before["intent"] != "active":
        print(f"{bookie_id} is {before['intent']} ({before['reason']}); the hook is not tried on it")
        return
    run("bindery-bookie-prestop")
    try:
        during = intent_of(bookie_id)
        if during["intent"] != "maintenance":
            sys.exit(f"test failed: after its preStop hook {bookie_id} is {during['intent']}, not in maintenance")
    finally:
        run("bindery", "bookie", "maintenance", bookie_id, "--end")
    after = intent_of(bookie_id)
    if after["intent"] != "active":
        sys.exit(f"test failed: {bookie_id} is still {after['intent']}")
    print(f"{bookie_id}: its preStop hook puts it into maintenance, and that can be ended")


if __name__ == "__main__":
    main()
