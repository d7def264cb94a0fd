"""docs/compatibility.md has the outcomes of this run."""

import pytest

from e2e.interop.conftest import TABLES, document_differences
from e2e.interop.table import DOCUMENT, FAILED

pytestmark = pytest.mark.interop


def test_the_document_shows_what_this_run_saw(request: pytest.FixtureRequest) -> None:
    failed = [row for table in TABLES for row, cells in table.cells.items() if FAILED in cells.values()]
    assert not failed, failed
    if request.config.getoption("--write"):
        text = DOCUMENT.read_text()
        for table in TABLES:
            if table.cells:
                text = table.replaced(text)
        DOCUMENT.write_text(text)
    assert document_differences() == []
