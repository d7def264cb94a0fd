"""`bindery dead-letters` against a broker in memory: requests, pages, questions, results."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bindery.common import output
from bindery.main import app
from bindery.topics import dead_letters
from bindery_core.errors import BadRequest
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]
SUB = "/v1/topics/public/default/orders/subscriptions/billing"
PATH = f"{SUB}/dead-letters"


class Letters:
    """Dead letters of a broker with ids 5:0, 5:1, ...; `refused` are not moved."""

    def __init__(self, count: int) -> None:
        self.ids = [f"5:{number}:-1:-1" for number in range(count)]
        self.refused: set[str] = set()
        self.calls: list[tuple[str, str, Any]] = []
        self.fail_at = 0
        """Number of the call that fails; 0: none."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        content = request.read()
        body = json.loads(content) if content else {}
        self.calls.append((request.method, request.url.path, body or dict(request.url.params)))
        if len(self.calls) == self.fail_at:
            return httpx.Response(503, json={"code": "try_again", "status": 503, "detail": "bookies are away"})
        if request.url.path.endswith("/explain"):
            about = {"topic": "public/default/orders-billing-DLQ", "backlog_entries": len(self.ids), "subscriptions": 1}
            return httpx.Response(200, json={"subscription": {"subscription": "billing", "dead_letters": about}})
        params = body or request.url.params
        after = params.get("after")
        left = self.ids if after is None else [one for one in self.ids if int(one[2:-6]) > int(after[2:-6])]
        count = int(params.get("limit") or params.get("max") or 10_000)
        chosen = body.get("message_ids") or left[:count]
        answer: dict[str, Any] = {"topic": "public/default/orders-billing-DLQ"}
        if chosen and chosen == left[:count]:
            answer["next"] = chosen[-1]
        if request.url.path.endswith("/redrive"):
            moved = [one for one in chosen if one in self.ids and one not in self.refused]
            failed = [one for one in chosen if one in self.refused]
            if not body["dry_run"]:
                self.ids = [one for one in self.ids if one not in moved]
            answer |= {"moved": len(moved), "skipped": len(chosen) - len(moved) - len(failed), "failed": len(failed)}
            if failed:
                answer["failures"] = [
                    {"message_id": one, "code": "too_large", "detail": "it is too large"} for one in failed[:20]
                ]
        elif request.url.path.endswith("/purge"):
            answer |= {"purged": len(chosen)}
            answer.pop("next", None)
        else:
            answer["messages"] = [
                {
                    "message_id": one,
                    "origin_message_id": "3:0:-1",
                    "reconsume_times": 17,
                    "redelivery_count": 0,
                    "publish_time": 1_700_000_000_000,
                    "key": "k",
                    "properties": {},
                    "size": 2_048,
                }
                for one in chosen
            ]
        return httpx.Response(200, json=answer)

    def bodies(self, verb: str) -> list[Any]:
        return [body for _, path, body in self.calls if path == f"{PATH}/{verb}".rstrip("/")]


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["dead-letters", *arguments], input=answer)


def test_dead_letters_are_listed_with_their_origin(serve: Serve) -> None:
    serve(letters := Letters(2))
    done = run("list", "orders", "billing", "--limit", "2")
    assert done.exit_code == 0
    heads, first, _ = (line.split("  ") for line in done.stdout.splitlines())
    assert [head.strip() for head in heads if head] == ["message id", "origin", "retries", "since", "key", "size"]
    assert {"5:0:-1:-1", "3:0:-1", "17", "k", "2.0 KiB"} <= {cell.strip() for cell in first}
    assert done.stderr == "more may follow; continue with --after 5:1:-1:-1\n"
    rows = json.loads(run("list", "orders", "billing", "--json").stdout)
    assert [row["message_id"] for row in rows] == letters.ids


def test_a_long_list_has_all_pages_up_to_its_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_MAX", 3)
    serve(letters := Letters(10))
    rows = json.loads(run("list", "orders", "billing", "--json", "--limit", "8", "--after", "5:0:-1:-1").stdout)
    assert [row["message_id"] for row in rows] == letters.ids[1:9]
    assert [call["limit"] for call in letters.bodies("")] == ["3", "3", "2"]


def test_an_empty_list_says_where_nothing_is(serve: Serve) -> None:
    serve(Letters(0))
    assert run("list", "orders", "billing").stdout == "no dead letters in public/default/orders-billing-DLQ\n"
    assert run("list", "orders", "billing", "--json").stdout == "[]\n"


def test_a_redrive_moves_all_in_pages(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_MAX", 4)
    serve(letters := Letters(10))
    done = run("redrive", "orders", "billing")
    assert (done.exit_code, done.stdout) == (0, "10 dead letters moved\n")
    assert letters.ids == []
    assert [body.get("after") for body in letters.bodies("redrive")] == [None, "5:3:-1:-1", "5:7:-1:-1", "5:9:-1:-1"]


def test_a_redrive_moves_at_most_max(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_MAX", 4)
    serve(letters := Letters(10))
    done = run("redrive", "orders", "billing", "--max", "6", "--json")
    assert json.loads(done.stdout) == {"moved": 6, "skipped": 0, "failed": 0, "dry_run": False}
    assert [body["max"] for body in letters.bodies("redrive")] == [4, 2]


def test_a_dry_run_counts_and_moves_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_MAX", 4)
    serve(letters := Letters(10))
    assert run("redrive", "orders", "billing", "--dry-run").stdout == "10 dead letters would be moved\n"
    assert len(letters.ids) == 10


def test_a_redrive_of_given_messages(serve: Serve) -> None:
    serve(letters := Letters(3))
    words = ["redrive", "orders", "billing", "--message-id", "5:1:-1:-1", "--message-id", "4:0:-1:-1"]
    done = run(*words)
    assert done.stdout == "1 dead letter moved, 1 had been moved or discarded before\n"
    assert letters.ids == ["5:0:-1:-1", "5:2:-1:-1"]


def test_messages_that_are_refused_are_reported_and_do_not_stop_the_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_MAX", 2)
    serve(letters := Letters(5))
    letters.refused = {"5:0:-1:-1", "5:1:-1:-1"}
    done = run("redrive", "orders", "billing")
    assert (done.exit_code, done.stdout) == (1, "3 dead letters moved\n")
    assert "2 messages could not be moved and stay dead letters; first: 5:0:-1:-1: it is too large" in done.stderr


def test_a_redrive_that_fails_says_what_it_moved(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_MAX", 2)
    serve(letters := Letters(5))
    letters.fail_at = 4
    done = run("redrive", "orders", "billing")
    assert done.exit_code == 1
    assert done.stderr.startswith("4 dead letters moved before this error\n")
    assert "bookies are away" in str(done.exception)


def test_a_dead_letter_topic_with_another_name(serve: Serve) -> None:
    serve(letters := Letters(1))
    run("list", "orders", "billing", "--dead-letter-topic", "graves")
    run("redrive", "orders", "billing", "--dead-letter-topic", "a/b/c d")
    run("purge", "orders", "billing", "--dead-letter-topic", "graves", "--yes")
    assert {body["topic"] for body in letters.bodies("")} == {"public/default/graves"}
    assert {body["topic"] for body in letters.bodies("redrive")} == {"a/b/c d"}
    assert letters.bodies("purge") == [{"topic": "public/default/graves"}]


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ([], {}),
        (["--before", "1970-01-01T00:00:01Z"], {"before": 1_000}),
        (["--message-id", "5:1:-1:-1"], {"message_ids": ["5:1:-1:-1"]}),
    ],
)
def test_dead_letters_are_discarded_after_a_confirmation(
    words: list[str], body: dict[str, Any], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(letters := Letters(3))
    unattended = run("purge", "orders", "billing", *words)
    assert unattended.exit_code == 2
    assert "3 entries are not acknowledged in public/default/orders-billing-DLQ: pass --yes" in unattended.stderr
    assert letters.bodies("purge") == []

    monkeypatch.setattr(output, "is_interactive", lambda: True)
    assert run("purge", "orders", "billing", *words, answer="n\n").exit_code == 1
    assert letters.bodies("purge") == []
    assert run("purge", "orders", "billing", *words, answer="y\n").exit_code == 0
    done = run("purge", "orders", "billing", *words, "--yes")
    assert done.stdout in ("3 dead letters discarded\n", "1 dead letter discarded\n")
    assert letters.bodies("purge")[0] == body


def test_a_purge_of_old_ones_sends_a_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "now_ms", lambda: 3_600_000)
    serve(letters := Letters(1))
    assert json.loads(run("purge", "orders", "billing", "--older-than", "1h", "--yes", "--json").stdout) == {
        "purged": 1
    }
    assert letters.calls[-1][2] in ({"before": 0}, {})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["redrive", "orders", "billing", "--max", "1", "--message-id", "5:0"], "--max and --message-id exclude"),
        (["purge", "orders", "billing", "--before", "x", "--older-than", "1h"], "--message-id, --older-than and"),
        (["purge", "orders", "billing", "--before", "today"], "not a time with its zone"),
        (["purge", "orders", "billing", "--older-than", "soon"], "not a duration"),
        (["redrive", "orders", "billing", *["--message-id", "5:0"] * 10_001], "at most 10000 ids"),
        (
            ["redrive", "orders", "billing", "--message-id", "5"],
            "--message-id needs a message id; the format is ledger:",
        ),
        (["purge", "orders", "billing", "--message-id", "x" * 99, "--yes"], "--message-id needs a message id"),
        (["list", "orders", "billing", "--after", "5:0:-1:-1:0"], "--after needs a message id"),
        (
            ["purge", "orders", "billing", "--older-than", "99999d", "--yes"],
            "--older-than must not reach back to before",
        ),
    ],
)
def test_wrong_options_are_refused_before_any_request(words: list[str], reason: str, serve: Serve) -> None:
    serve(letters := Letters(1))
    refused = run(*words).exception
    assert isinstance(refused, BadRequest)
    assert str(refused).startswith(reason)
    assert letters.calls == []


def test_an_explanation_shows_its_warnings(serve: Serve) -> None:
    explanation = {"subscription": {}, "states": {}, "summary": "all is acknowledged", "warnings": ["nobody keeps it"]}
    serve(lambda _request: httpx.Response(200, json=explanation))
    done = CliRunner().invoke(app, ["subscriptions", "explain", "orders", "billing"])
    assert done.stdout == "all is acknowledged\nwarning: nobody keeps it\n"


def test_another_subscription_keeps_the_dead_letters(serve: Serve) -> None:
    serve(letters := Letters(1))
    for words in (["list"], ["redrive", "--dry-run"], ["redrive", "--message-id", "5:0"], ["purge", "--yes"]):
        run(words[0], "orders", "billing", *words[1:], "--initial-subscription", "morgue")
    for verb in ("", "redrive", "purge"):
        assert {body["initial_subscription"] for body in letters.bodies(verb)} == {"morgue"}
    unattended = run("purge", "orders", "billing", "--initial-subscription", "morgue")
    assert "the number of dead letters in public/default/orders-billing-DLQ is unknown: pass --yes" in unattended.stderr


def test_nothing_to_discard_needs_no_confirmation(serve: Serve) -> None:
    serve(letters := Letters(0))
    done = run("purge", "orders", "billing")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "there are no dead letters\n", "")
    assert run("purge", "orders", "billing", "--json").stdout == '{"purged": 0}\n'
    assert letters.bodies("purge") == []


def test_one_is_singular(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(letters := Letters(1))
    letters.refused = {"5:0:-1:-1"}
    assert (
        "1 message could not be moved and stays a dead letter; first: 5:0" in run("redrive", "orders", "billing").stderr
    )
    assert "1 entry is not acknowledged in" in run("purge", "orders", "billing").stderr
    monkeypatch.setattr(output, "is_interactive", lambda: True)
    asked = run("purge", "orders", "billing", "--message-id", "5:0:-1:-1", answer="n\n")
    assert "Discard 1 dead letter of billing?" in asked.stderr


def test_keys_of_producers_cannot_control_the_terminal(serve: Serve) -> None:
    letter = {"message_id": "5:0:-1:-1", "publish_time": 0, "key": "\x1b[2J\n" + "k" * 500, "size": 1, "properties": {}}
    serve(lambda _request: httpx.Response(200, json={"topic": "public/default/dlq", "messages": [letter]}))
    done = run("list", "orders", "billing")
    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout
    assert "\\u001b[2J\\nkkk" in done.stdout
    assert "k" * 120 not in done.stdout
