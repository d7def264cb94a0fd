"""The packaged chart."""

import tarfile
from pathlib import Path

from rendering import CHART, helm

LICENSE = CHART.parents[1] / "LICENSE"


def test_the_packaged_chart_contains_the_license(tmp_path: Path) -> None:
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.iterdir()
    with tarfile.open(package) as archive:
        content = archive.extractfile("bindery/LICENSE")
        assert content is not None
        assert content.read() == LICENSE.read_bytes(), "copy LICENSE to charts/bindery"
