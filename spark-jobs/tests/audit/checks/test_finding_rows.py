"""Frames that are evaluated once: in files that survive an executor, if there is a directory for them."""

from types import SimpleNamespace
from typing import Any

import pytest
from bindery_spark.audit.checks.finding_rows import kept, together


def frame(directory: str | None) -> Any:
    context = SimpleNamespace(getCheckpointDir=lambda: directory)
    return SimpleNamespace(
        sparkSession=SimpleNamespace(sparkContext=context),
        checkpoint=lambda: "in files",
        localCheckpoint=lambda: "in memory",
    )


def test_a_result_is_kept_in_files_if_executors_share_a_directory() -> None:
    assert kept(frame("/shared")) == "in files"  # type: ignore[comparison-overlap]
    assert kept(frame(None)) == "in memory"  # type: ignore[comparison-overlap]


def test_one_frame_alone_is_unchanged() -> None:
    only = frame(None)
    assert together([only]) is only
    with pytest.raises(TypeError):
        together([])
