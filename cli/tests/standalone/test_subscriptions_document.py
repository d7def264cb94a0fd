"""The commands in docs/subscriptions.md work, one after another, and the document has all codes of explain."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_broker.subscriptions import explaining

TEXT = (Path(__file__).parents[3] / "docs" / "subscriptions.md").read_text()
URL = "http://127.0.0.1:8080"
SHELL = """set -eu
curl() { command curl --fail-with-body --max-time 60 "$@" && echo; }
"""
"""A refused request ends the script, and each answer is on a line of its own."""


def test_every_code_of_explain_is_documented() -> None:
    codes = re.findall(r"^\| (\w+) +\|", explaining.__doc__ or "", re.MULTILINE)
    assert len(codes) > 10
    assert (
        re.findall(r"^\| `(\w+)` \| .* \|", TEXT.partition("## Why is")[2].partition("##")[0], re.MULTILINE)
        == codes[1:]
    )


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(400)
def test_the_commands_work_one_after_another(tmp_path: Path) -> None:
    script = SHELL + "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    script = script.replace("/tmp/", f"{tmp_path}/")
    with ThrowawayCluster(bookies=3) as cluster:
        url = cluster.url
        environment = os.environ | {
            "BINDERY_URL": url,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-c", script.replace(URL, url)], capture_output=True, text=True, timeout=300, env=environment
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for payload in (
        "three",
        "four",
        "order of eve",
        "sticky order",
        "early order",
        "set y",
        "page-1",
        "to Paris",
        "charge card 7",
        "charge card 8",
    ):
        assert payload in lines, done.stdout
    assert '"redelivery_count":1' in done.stdout
    assert "to Tokyo" not in lines
    assert "phone: cancelled" in lines
    assert "2 dead letters would be moved" in lines
    assert '"moved":1' in done.stdout
    assert "1 dead letter moved" in lines
