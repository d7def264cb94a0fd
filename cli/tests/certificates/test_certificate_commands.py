"""`bindery certificates`: the commands, and what they print."""

import json
from pathlib import Path

from bindery.common import exit_codes
from command import bindery


def ok(*arguments: str) -> str:
    found = bindery("certificates", *arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_an_authority_a_server_and_a_client_are_made_step_by_step(tmp_path: Path) -> None:
    at = ("--directory", str(tmp_path / "secrets"))
    refused = bindery("certificates", "create", *at, "broker", "--host", "localhost")
    assert refused.returncode == exit_codes.USAGE
    assert "bindery certificates create-ca" in refused.stderr
    ok("create-ca", *at)
    ok("create", *at, "broker", "--host", "localhost", "--host", "::1", "--days", "30")
    ok("create", *at, "scraper")
    shown = json.loads(ok("show", str(tmp_path / "secrets" / "broker.crt"), "--json"))
    assert (shown["common_name"], shown["hosts"], shown["authority"]) == ("broker", ["localhost", "::1"], False)
    assert shown["near_its_end"] is False
    assert "an authority" in ok("show", str(tmp_path / "secrets" / "ca.crt"))
    assert "hosts: none" in ok("show", str(tmp_path / "secrets" / "scraper.crt"))


def test_one_command_makes_all_and_its_repetition_says_what_it_kept(tmp_path: Path) -> None:
    arguments = ("create-cluster", "-d", str(tmp_path / "s"), "--server", "broker=localhost,127.0.0.1", "--role")
    assert {line.split()[0] for line in ok(*arguments, "admin").splitlines()} == {"created"}
    made = {Path(one["file"]).name: one for one in map(json.loads, ok(*arguments, "other", "--json").splitlines())}
    assert {name for name, one in made.items() if one["action"] == "created"} == {"other.token"}
    assert made["broker.crt"]["expires_at"] is not None
    token, key = (str(tmp_path / "s" / name) for name in ("admin.token", "tokens.pub"))
    assert bindery("tokens", "validate", "-f", token, "-pk", key).returncode == 0


def test_errors_say_what_to_pass(tmp_path: Path) -> None:
    for arguments, told in (
        (("create-cluster", "-d", str(tmp_path / "s"), "--server", "broker"), "NAME=HOST"),
        (("create-cluster", "-d", str(tmp_path / "s"), "--server", "broker="), "at least one host"),
        (("show", str(tmp_path / "none")), "No such file"),
    ):
        refused = bindery("certificates", *arguments)
        assert (refused.returncode, told in refused.stderr) == (exit_codes.USAGE, True), refused.stderr
