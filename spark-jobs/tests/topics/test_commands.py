"""The commands export and count: options, output and exit codes, without Spark."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from bindery_client.connection.security import SecurityFiles
from bindery_core.errors import Unauthorized
from bindery_metadata.stores.zookeeper_access import AccessFiles
from bindery_spark import progress as progress_module
from bindery_spark import session as session_module
from bindery_spark.main import main
from bindery_spark.progress import QuietProgress
from bindery_spark.sources import cluster as cluster_module
from bindery_spark.topics import count as count_module
from bindery_spark.topics import export as export_module


class Jobs:
    """Replaces Spark and both jobs: records their options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sessions: list[tuple[Any, ...]] = []
        self.exports: list[dict[str, Any]] = []
        self.counts: list[dict[str, Any]] = []
        self.problems = 0
        self.rows: list[dict[str, Any]] = []
        self.polls: list[float] = []
        self.on_poll: Callable[[int], bool] = lambda number: number >= 2
        self.is_stopped = False
        monkeypatch.setattr(session_module, "session", self.session)
        monkeypatch.setattr(export_module, "export", self.export)
        monkeypatch.setattr(count_module, "start_count", self.count)
        monkeypatch.setattr(count_module, "read_counts", lambda _: pa.Table.from_pylist(self.rows))
        monkeypatch.setattr(progress_module, "TerminalProgress", lambda spark, clock: self)
        monkeypatch.delenv("BINDERY_ZOOKEEPER", raising=False)
        self.checked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(cluster_module, "check_access", lambda *arguments: self.checked.append(arguments))

    def session(self, *arguments: Any) -> str:
        self.sessions.append(arguments)
        return "spark"

    def __enter__(self) -> str:
        return "a bar"

    def __exit__(self, *_: object) -> None:
        pass

    def export(self, spark: str, options: dict[str, str], out: Path, **more: Any) -> dict[str, Any]:
        self.exports.append({"options": options, "out": out, **more})
        return {"rows": 7, "problems": self.problems, "topic": "public/default/t"}

    def count(self, spark: str, options: dict[str, str], checkpoint: Path, **more: Any) -> "Jobs":
        self.counts.append({"options": options, "checkpoint": checkpoint, **more})
        more["on_batch"](3, pa.Table.from_pylist([{"messages": 4}, {"messages": 5}]))
        return self

    def awaitTermination(self, timeout_s: float) -> bool:
        self.polls.append(timeout_s)
        return self.on_poll(len(self.polls))

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(monkeypatch)


@pytest.mark.parametrize(
    ("problems", "warning"), [(0, ""), (2, "bindery: 2 rows have a problem; see the column `problem`\n")]
)
def test_an_export_prints_its_result_and_problems(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str], problems: int, warning: str
) -> None:
    jobs.problems = problems
    assert main(["export", "--topic", "t", "--out", str(tmp_path / "x")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"7 messages of public/default/t in {(tmp_path / 'x').resolve()}, ")
    seconds = float(printed.out.rsplit(",", 1)[1].removesuffix(" s\n"))
    assert 0 <= seconds < 60
    assert printed.err == warning
    (asked,) = jobs.exports
    assert asked == {
        "options": {
            "zookeeper": "127.0.0.1:2181",
            "ledgers_root": "/ledgers",
            "topic": "t",
            "rate": "0.000",
            "start": "earliest",
            "end": "latest",
        },
        "out": (tmp_path / "x").resolve(),
        "overwrite": False,
        "progress": "a bar",
    }
    assert jobs.sessions == [(2, "bindery export t")]


@pytest.mark.parametrize("command", ["export", "count"])
def test_credentials_are_checked_before_spark_starts_and_become_options(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setenv("BINDERY_CLIENT_CA_FILE", "/ca")
    monkeypatch.setenv("BINDERY_ZOOKEEPER_CREDENTIALS_FILE", "/zookeeper")
    where = {"export": "--out", "count": "--checkpoint"}[command]
    options = ["--token-file", "/mine", "--no-check-hostname"]
    assert main([command, "--topic", "t", where, str(tmp_path / "x"), *options]) == 0
    security = SecurityFiles(token_file="/mine", ca_file="/ca", check_hostname=False)
    wanted = ("127.0.0.1:2181", "/ledgers", security, AccessFiles(credentials_file="/zookeeper"))
    assert jobs.checked == [wanted]
    (asked,) = jobs.exports or jobs.counts
    named = {"token_file", "ca_file", "check_hostname", "zookeeper_credentials_file"}
    assert {name: asked["options"].get(name) for name in named} == {
        "token_file": "/mine",
        "ca_file": "/ca",
        "check_hostname": "false",
        "zookeeper_credentials_file": "/zookeeper",
    }
    jobs.checked.clear()

    def refuses(*_: Any) -> None:
        raise Unauthorized("made up")

    monkeypatch.setattr(cluster_module, "check_access", refuses)
    assert main([command, "--topic", "t", where, str(tmp_path / "x")]) == 4
    assert len(jobs.sessions) == 1


def test_an_export_as_json_shows_no_progress(jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", "3KiB", "--cores", "3", "--from", "7:0", "--to", "9:0", "--overwrite", "--json"]
    assert main(["export", "--topic", "t", "--out", str(tmp_path / "x"), *words]) == 0
    printed = capsys.readouterr().out
    assert (
        printed
        == json.dumps(
            {"directory": str((tmp_path / "x").resolve()), "problems": 0, "rows": 7, "topic": "public/default/t"}
        )
        + "\n"
    ), "in the order of the names"
    (asked,) = jobs.exports
    assert asked["overwrite"] is True
    assert isinstance(asked["progress"], QuietProgress)
    assert asked["options"]["rate"] == "1024.000", "a third for each task"
    assert (asked["options"]["start"], asked["options"]["end"]) == ("7:0", "9:0")


def test_an_existing_target_is_found_before_spark_starts(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["export", "--topic", "t", "--out", str(tmp_path)]) == 4
    assert "--overwrite replaces" in capsys.readouterr().err
    assert main(["export", "--topic", "a/b", "--out", str(tmp_path / "x")]) == 4
    assert jobs.sessions == []


def counted(key: str | None, messages: int, unreadable: int = 0) -> dict[str, Any]:
    return {"key": key, "key_is_base64": False, "messages": messages, "unreadable": unreadable}


def test_a_count_polls_until_the_query_ends_and_prints_its_counts(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.rows = [counted("k", 12), counted(None, 3, 2)]
    assert main(["count", "--topic", "t", "--checkpoint", str(tmp_path / "c")]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "          12  k",
        "           3  (no key)",
        "          15  messages, and 2 entries that cannot be read",
    ]
    assert printed.err == "batch 3: 9 messages, 2 keys\n"
    assert jobs.polls == [0.5, 0.5]
    (asked,) = jobs.counts
    assert (asked["checkpoint"], asked["every_s"]) == ((tmp_path / "c").resolve(), 5.0)
    assert asked["options"] == {
        "zookeeper": "127.0.0.1:2181",
        "ledgers_root": "/ledgers",
        "topic": "t",
        "rate": "0.000",
        "start": "earliest",
        "max_entries_per_trigger": "0",
        "fail_on_data_loss": "true",
    }
    assert jobs.sessions == [(2, "bindery count t")]


def test_options_of_a_count_are_passed_on(jobs: Jobs, tmp_path: Path) -> None:
    words = ["--from", "latest", "--until-now", "--max-entries", "9", "--skip-lost", "--cores", "4"]
    assert main(["count", "--topic", "t", "--checkpoint", str(tmp_path / "c"), *words]) == 0
    assert main(["count", "--topic", "t", "--checkpoint", str(tmp_path / "c"), "--every", "1m"]) == 0
    first, second = jobs.counts
    assert (first["every_s"], second["every_s"]) == (None, 60.0)
    assert (first["options"]["max_entries_per_trigger"], first["options"]["fail_on_data_loss"]) == ("9", "false")
    assert first["options"]["start"] == "latest"
    assert jobs.sessions[0] == (4, "bindery count t")


@pytest.mark.parametrize(("count", "more"), [(20, []), (21, ["and 1 more keys"])])
def test_at_most_20_keys_are_printed(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, more: list[str]
) -> None:
    jobs.rows = [counted(f"k{number}", 1) for number in range(count)]
    assert main(["count", "--topic", "t", "--checkpoint", str(tmp_path / "c")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[20:] == [*more, f"          {count}  messages"]


def test_counts_as_json_have_all_keys(jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.rows = [counted("k", 12), counted(None, 3, 2)]
    assert main(["count", "--topic", "t", "--checkpoint", str(tmp_path / "c"), "--json"]) == 0
    printed = capsys.readouterr().out
    facts = {"keys": jobs.rows, "messages": 15, "topic": "t", "unreadable": 2}
    assert printed == json.dumps(facts, sort_keys=True) + "\n"


def test_an_interrupted_count_prints_its_counts_and_how_to_resume(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupts(_: int) -> bool:
        raise KeyboardInterrupt

    jobs.on_poll = interrupts
    jobs.rows = [counted("k", 12)]
    assert main(["count", "--topic", "t", "--checkpoint", str(tmp_path / "c")]) == 130
    printed = capsys.readouterr()
    assert jobs.is_stopped
    assert printed.err.endswith("\ninterrupted; run the same command to resume\n")
    assert printed.out.splitlines()[-1] == "          12  messages"


def test_an_export_reports_one_group_with_its_ledgers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The export itself, with another writer than Spark."""
    calls: list[tuple[Any, ...]] = []
    slices = [
        SimpleNamespace(cost=5, ledger_id=1),
        SimpleNamespace(cost=7, ledger_id=1),
        SimpleNamespace(cost=1, ledger_id=2),
    ]
    parts = [SimpleNamespace(slices=slices[:2]), SimpleNamespace(slices=slices[2:])]
    monkeypatch.setattr(export_module.TopicReader, "planned", lambda _: parts)
    progress = SimpleNamespace(
        plan=lambda *a: calls.append(("plan", *a)),
        group=lambda *a: calls.append(("group", *a)),
        done=lambda *a: calls.append(("done", *a)),
    )
    spark = Writer()
    facts = export_module.export(
        spark,
        {"zookeeper": "h:1", "topic": "t"},
        tmp_path / "a" / "b" / "x",
        overwrite=False,
        progress=progress,  # type: ignore[arg-type]
    )
    assert calls == [("plan", 13, 0, 1), ("group", 0, 2, 13), ("done", 13)]
    assert facts == {"topic": "public/default/t", "from": "earliest", "to": "latest", "rows": 3, "problems": 1}
    assert (tmp_path / "a" / "b" / "x" / "_export.json").read_text() == json.dumps(facts, indent=2) + "\n"
    assert spark.beside_mode == 0o755, "executors may run as another user"


class Writer:
    """Replaces Spark's reader and writer."""

    beside_mode = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "write"):
            return self
        return lambda *_, **__: self

    def parquet(self, path: str) -> None:
        self.beside_mode = Path(path).parent.stat().st_mode & 0o777
        Path(path).mkdir()
        table = pa.Table.from_pylist([{"problem": None}, {"problem": "x"}, {"problem": None}])
        parquet.write_table(table, f"{path}/1.parquet")
