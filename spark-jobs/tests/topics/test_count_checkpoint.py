"""The checkpoint of a count: only the count that created it may use it."""

import json
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_spark.topics.count import claim

OPTIONS = {"zookeeper": "a:2181", "topic": "t"}


def test_a_checkpoint_is_of_one_count_and_one_cluster(tmp_path: Path) -> None:
    checkpoint = tmp_path / "c"
    claim(checkpoint, OPTIONS, cluster_id="one")
    claim(checkpoint, {**OPTIONS, "zookeeper": "another-server-of-it:2181"}, cluster_id="one")
    with pytest.raises(BadRequest, match="counts something else"):
        claim(checkpoint, OPTIONS, cluster_id="other")
    with pytest.raises(BadRequest, match="counts something else"):
        claim(checkpoint, {**OPTIONS, "topic": "u"}, cluster_id="one")


def test_a_checkpoint_without_a_cluster_id_is_accepted(tmp_path: Path) -> None:
    before = {"topic": "public/default/t", "ledgers_root": "/ledgers", "start": "earliest"}
    (tmp_path / "query.json").write_text(json.dumps(before))
    claim(tmp_path, OPTIONS, cluster_id="one")
    with pytest.raises(BadRequest, match="counts something else"):
        claim(tmp_path, {**OPTIONS, "start": "latest"}, cluster_id="one")


def test_a_directory_with_other_files_is_rejected_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(BadRequest, match="not a checkpoint"):
        claim(tmp_path, OPTIONS, cluster_id="one")
