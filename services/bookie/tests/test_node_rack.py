"""`bindery-bookie-rack`: the rack of a bookie from a label of its node."""

import json
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.node_rack import LIMIT_S, PAUSE_S, NotRead, main, write_rack
from bindery_core.errors import BadRequest

LABEL = "topology.kubernetes.io/zone"


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds


class Api:
    """Gives one answer after the other, and the last one again."""

    def __init__(self, *answers: tuple[int, Any] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def get(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, body = answer
        return status, body if isinstance(body, bytes) else json.dumps(body).encode()


def node(**labels: str) -> dict[str, Any]:
    return {"kind": "PartialObjectMetadata", "metadata": {"name": "node-1", "labels": labels}}


def run(api: Api, tmp_path: Path, *, name: str = "node-1") -> str:
    return write_rack(api, tmp_path / "rack", LABEL, node=name, clock=Clock())


def test_the_label_becomes_the_rack(tmp_path: Path) -> None:
    api = Api((200, node(**{LABEL: "eu-west-1a", "other": "x"})))
    assert "the rack is /eu-west-1a" in run(api, tmp_path)
    assert (tmp_path / "rack").read_text() == "/eu-west-1a\n"
    assert api.asked == ["/api/v1/nodes/node-1"]


@pytest.mark.parametrize("found", [node(other="x"), {"metadata": {}}, {"metadata": {"labels": None}}])
def test_without_the_label_the_file_is_empty(tmp_path: Path, found: dict[str, Any]) -> None:
    assert f"has no label {LABEL}" in run(Api((200, found)), tmp_path)
    assert (tmp_path / "rack").read_text() == ""


def test_an_api_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    api = Api(ConnectionRefusedError("refused"), (503, b"busy"), (200, node(**{LABEL: "a"})))
    assert "the rack is /a" in run(api, tmp_path)


def test_it_gives_up_after_a_minute(tmp_path: Path) -> None:
    api = Api(TimeoutError("timed out"))
    with pytest.raises(NotRead, match="does not answer: timed out"):
        run(api, tmp_path)
    assert len(api.asked) == LIMIT_S / PAUSE_S + 1
    assert not (tmp_path / "rack").exists()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((403, b""), "check the bookies' ClusterRole"),
        ((401, b""), "check the bookies' ClusterRole"),
        ((404, b""), "knows no node node-1"),
        ((200, b"<html>"), "something else than a node"),
        ((200, b"[]"), "something else than a node"),
        ((200, {"metadata": {"labels": {LABEL: 7}}}), "is no text"),
    ],
)
def test_an_answer_that_does_not_change_is_reported_at_once(
    tmp_path: Path, answer: tuple[int, Any], reason: str
) -> None:
    api = Api(answer)
    with pytest.raises(NotRead, match=reason):
        run(api, tmp_path)
    assert len(api.asked) == 1
    assert not (tmp_path / "rack").exists()


@pytest.mark.parametrize("name", ["", "../secrets", "a/b", "A"])
def test_a_name_that_is_no_node_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="NODE_NAME"):
        run(Api((200, node())), tmp_path, name=name)


def test_outside_of_a_pod_the_bookie_starts_without_a_rack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main([str(tmp_path / "rack"), LABEL]) == 0
    assert "this is no pod" in capsys.readouterr().err


def test_help_and_wrong_usage_show_the_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert capsys.readouterr().out.count("bindery-bookie-rack FILE LABEL") == 2
