"""Resolve the workspace and write requirements.lock: every version with its hashes, and no index address.

uv's own lock file names the index that it was resolved from, which ties it to one mirror; docs/adr/0001 says why the
exported form is the one kept in the repository.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"


def main() -> None:
    subprocess.run([UV, "lock", *sys.argv[1:]], cwd=ROOT, check=True)
    exported = subprocess.run(
        [
            UV,
            "export",
            "--frozen",
            "--all-groups",
            "--no-emit-workspace",
            "--no-header",
            "--format",
            "requirements-txt",
        ],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout
    assert "://" not in exported, "the lock would name an index"
    (ROOT / "requirements.lock").write_text(exported)


if __name__ == "__main__":
    main()
