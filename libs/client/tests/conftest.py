"""Lets test modules of this folder import the contract suite and the fake bookie beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ledger_client_contract")
