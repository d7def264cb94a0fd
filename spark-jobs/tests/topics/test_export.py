"""The directory of an export: only exports are replaced, and other files are not touched."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from bindery_core.errors import AlreadyExists, BadRequest
from bindery_spark.sources.topic.source import TopicReader
from bindery_spark.topics import export as topic_export
from bindery_spark.topics.export import FACTS, UNFINISHED, check_target, export

OPTIONS = {"zookeeper": "a:2181", "topic": "t"}


ROW = {"message_id": "1:0:-1:-1", "problem": None}


class Silent:
    def plan(self, size: int, done: int, groups: int) -> None: ...

    def group(self, number: int, ledgers: int, size: int) -> None: ...

    def done(self, size: int) -> None: ...


class OneRow:
    """Replaces Spark: reads nothing and writes one row, then calls `before_end`."""

    def __init__(self) -> None:
        self.before_end = lambda: None
        self.written: list[Path] = []

    @property
    def read(self) -> "OneRow":
        return self

    write = read

    def format(self, name: str) -> "OneRow":
        return self

    def options(self, **options: str) -> "OneRow":
        return self

    def load(self) -> "OneRow":
        return self

    def mode(self, mode: str) -> "OneRow":
        return self

    def parquet(self, path: str) -> None:
        Path(path).mkdir()
        parquet.write_table(
            pa.Table.from_pylist([ROW], pa.schema({"message_id": pa.string(), "problem": pa.string()})),
            f"{path}/1.parquet",
        )
        self.written.append(Path(path))
        self.before_end()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> OneRow:
    monkeypatch.setattr(TopicReader, "planned", lambda _: [])
    return OneRow()


def run(jobs: OneRow, out: Path, *, overwrite: bool = True) -> dict:
    return export(jobs, OPTIONS, out, overwrite=overwrite, progress=Silent())  # type: ignore[arg-type]


def test_other_files_beside_an_export_are_not_touched(jobs: OneRow, tmp_path: Path) -> None:
    out = tmp_path / "orders"
    assert run(jobs, out)["rows"] == 1
    for name in ("orders.old", "orders.making"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("precious")
    assert run(jobs, out)["rows"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["orders", "orders.making", "orders.old"]
    assert all((tmp_path / name / "mine.txt").exists() for name in ("orders.old", "orders.making"))
    assert {path.suffix for path in out.iterdir() if not path.name.startswith(("_", "."))} == {".parquet"}


def test_an_empty_directory_becomes_the_export(jobs: OneRow, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    run(jobs, tmp_path / "new", overwrite=False)
    assert (tmp_path / "new" / FACTS).exists()


def test_files_that_are_added_during_the_export_are_kept(jobs: OneRow, tmp_path: Path) -> None:
    out = tmp_path / "orders"
    out.mkdir()
    jobs.before_end = lambda: (out / "thesis.txt").write_text("years of work") and None
    with pytest.raises(AlreadyExists):
        run(jobs, out, overwrite=False)
    with pytest.raises(BadRequest, match="not an export"):
        run(jobs, out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["orders"], "nothing unfinished is left"


def test_an_export_that_cannot_be_replaced_is_kept(
    jobs: OneRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "orders"
    run(jobs, out)
    (out / "mark").touch()
    rename = Path.rename

    def refuses(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("disk full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(OSError, match="disk full"):
        run(jobs, out)
    assert (out / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["orders"]


def test_leftovers_of_a_killed_export_do_not_affect_later_exports(
    jobs: OneRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(topic_export.shutil, "rmtree", lambda *_, **__: None)
        jobs.before_end = lambda: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[assignment, return-value]
        with pytest.raises(KeyboardInterrupt):
            run(jobs, tmp_path / "orders")
    [left] = tmp_path.iterdir()
    assert left.name.startswith(UNFINISHED)
    with pytest.raises(BadRequest, match="not an export"):
        check_target(left, overwrite=True)
    jobs.before_end = lambda: None
    run(jobs, tmp_path / "orders")
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "orders"]
    assert jobs.written[0] != jobs.written[1]
