"""E2E_SAMPLE=<seed>: a third of the mutants of whole clusters, chosen by the seed, as in `.ci/run`. Otherwise all."""

import os
from typing import Final

import pytest

SHARES: Final = 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample = os.environ.get("E2E_SAMPLE")
    if not sample:
        return
    mutants = [item for item in items if item.path.stem.endswith("mutants") and item.get_closest_marker("simulator")]
    chosen = set(mutants[int(sample) % SHARES :: SHARES])
    dropped = [item for item in mutants if item not in chosen]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)
