"""Export the messages of a topic as Parquet files, one row of `schemas.MESSAGES` per message.

DIR contains part-*.parquet and _export.json: topic, bounds, number of rows, number of rows with a problem. DIR appears
only when it is complete: files are first written to a hidden directory beside DIR, whose name is UNFINISHED and a
unique suffix. An export that is replaced is moved to this hidden directory until the new one is in its place. If the
job is killed, the hidden directory remains; readers of the parent directory ignore it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow.dataset as dataset
from bindery_core.errors import AlreadyExists, BadRequest
from pyspark.sql import SparkSession

from bindery_spark.progress import AuditProgress
from bindery_spark.sources.topic.options import TOPIC_FORMAT, TopicOptions
from bindery_spark.sources.topic.source import TopicReader

FACTS: Final = "_export.json"
"""Name of the file that describes an export."""
UNFINISHED: Final = ".bindery-export-"
"""Prefix of the hidden directory of an unfinished export."""


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise AlreadyExists or BadRequest if `out` has content that must not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise AlreadyExists(
            "the target exists and is not an empty directory; --overwrite replaces an earlier export", out=out
        )
    if not (out / FACTS).is_file():
        raise BadRequest(f"not an export, it has no {FACTS}: choose another directory, or empty it", out=out)


def export(
    spark: SparkSession, options: Mapping[str, str], out: Path, *, overwrite: bool, progress: AuditProgress
) -> dict[str, Any]:
    """Run the export and return the content of `_export.json`. `options`: of `bindery-topic`.

    Raises the errors of `check_target` and of the data source.
    """
    check_target(out, overwrite=overwrite)
    parsed = TopicOptions.parse(options, os.environ)
    tasks = [part.slices for part in TopicReader(parsed).planned()]
    size = sum(each.cost for task in tasks for each in task)
    progress.plan(size, 0, 1)
    progress.group(0, len({each.ledger_id for task in tasks for each in task}), size)
    beside = _fresh_beside(out)
    making = beside / "new"
    try:
        spark.read.format(TOPIC_FORMAT).options(**options).load().write.mode("overwrite").parquet(str(making))
        facts = _facts(parsed, options, making)
        (making / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        check_target(out, overwrite=overwrite)
        _replace(making, out, old=beside / "old")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    progress.done(size)
    return facts


def _facts(parsed: TopicOptions, options: Mapping[str, str], directory: Path) -> dict[str, Any]:
    rows = dataset.dataset(directory, format="parquet")
    return {
        "topic": parsed.topic.short,
        "from": options.get("start", "earliest"),
        "to": options.get("end", "latest"),
        "rows": rows.count_rows(),
        "problems": rows.count_rows(filter=dataset.field("problem").is_valid()),
    }


def _fresh_beside(out: Path) -> Path:
    """Create a directory on the same disk as `out`, readable by others: executors may run as another user."""
    out.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=out.parent))
    directory.chmod(0o755)
    return directory


def _replace(making: Path, out: Path, *, old: Path) -> None:
    """Rename `out` to `old` and `making` to `out`. If that fails, `out` is restored."""
    if not out.exists():
        making.rename(out)
        return
    out.rename(old)
    try:
        making.rename(out)
    except OSError:
        old.rename(out)
        raise
