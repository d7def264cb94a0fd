"""Results go to stdout, everything else to stderr, as text or JSON."""

import json
import os
import sys

import pytest
import typer
from bindery.common import output
from bindery.common.output import (
    confirm,
    counted,
    emit,
    is_interactive,
    print_json,
    print_lines,
    print_table,
    report_error,
    wants_json,
)

Capture = pytest.CaptureFixture[str]


def test_json_is_one_line(capsys: Capture) -> None:
    print_json({"a": [1, "x\ny"]})
    assert capsys.readouterr().out == '{"a": [1, "x\\ny"]}\n'


@pytest.mark.parametrize(
    ("text", "as_json", "out"),
    [
        ("one", False, "one\n"),
        (["a", "b"], False, "a\nb\n"),
        (iter("ab"), False, "a\nb\n"),
        ("one", True, '{"a": 1}\n'),
    ],
)
def test_facts_are_printed_as_text_or_json(text: str, as_json: bool, out: str, capsys: Capture) -> None:
    emit({"a": 1}, text, as_json=as_json)
    assert capsys.readouterr() == (out, "")


def test_a_table_in_a_pipe_is_plain(capsys: Capture) -> None:
    print_table([{"a": 1, "b": 2}, {"a": 33}])
    print_table([{"a": 1, "b": 2}], columns=["b"])
    assert capsys.readouterr().out == "a   b\n1   2\n33  -\nb\n2\n"


def test_an_error_is_one_line_on_stderr(capsys: Capture) -> None:
    report_error("no such ledger", as_json=False)
    assert capsys.readouterr() == ("", "bindery: no such ledger\n")


@pytest.mark.parametrize(
    ("options", "code", "exit_code"), [({}, "failed", 1), ({"code": "damaged", "exit_code": 3}, "damaged", 3)]
)
def test_an_error_in_json_has_code_and_exit_code(
    options: dict[str, object], code: str, exit_code: int, capsys: Capture
) -> None:
    report_error("bad", as_json=True, **options)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {"error": {"code": code, "message": "bad", "exit_code": exit_code}}
    assert err.count("\n") == 1


def test_without_a_terminal_a_question_is_an_error_with_the_alternative(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert not is_interactive()
    with pytest.raises(typer.Exit) as caught:
        confirm("Really?", unattended="pass --yes", as_json=True)
    assert caught.value.exit_code == 2
    assert json.loads(capsys.readouterr().err)["error"] == {
        "code": "confirmation_needed",
        "message": "pass --yes",
        "exit_code": 2,
    }


@pytest.mark.parametrize("answer", [True, False])
def test_a_question_on_the_terminal_is_asked_on_stderr(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    asked: list[tuple[str, bool]] = []

    def ask(question: str, *, err: bool) -> bool:
        asked.append((question, err))
        return answer

    monkeypatch.setattr(output, "is_interactive", lambda: True)
    monkeypatch.setattr(typer, "confirm", ask)
    if answer:
        confirm("Really?", unattended="pass --yes", as_json=False)
    else:
        with pytest.raises(typer.Exit) as caught:
            confirm("Really?", unattended="pass --yes", as_json=False)
        assert caught.value.exit_code == 1
    assert asked == [("Really?", True)]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["a", "--json"], True),
        (["--json", "--", "x"], True),
        (["a", "--", "--json"], False),
        (["a", "--jsonx"], False),
        ([], False),
    ],
)
def test_a_command_line_wants_json_before_the_double_dash(arguments: list[str], wanted: bool) -> None:
    assert wants_json(arguments) is wanted


def test_text_of_others_cannot_control_the_terminal(capsys: Capture) -> None:
    print_lines(["a\x1b[2J", "b\nc"])
    emit({}, "one\x9b", as_json=False)
    print_table([{"key\n": "\r"}])
    report_error("no\nsuch", as_json=False)
    assert capsys.readouterr() == ("a\\u001b[2J\nb\\nc\none\\u009b\nkey\n\\r\n", "bindery: no\\nsuch\n")


def test_a_closed_stdin_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert not is_interactive()


def test_an_error_is_reported_although_stdout_is_full(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        print("x")
        report_error("bad", as_json=False)
        assert capsys.readouterr().err == "bindery: bad\n"
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (0, ("message",), "0 messages"),
        (1, ("message",), "1 message"),
        (1, ("entry", "entries"), "1 entry"),
        (2, ("entry", "entries"), "2 entries"),
    ],
)
def test_one_is_singular(count: int, words: tuple[str, ...], text: str) -> None:
    assert counted(count, *words) == text
