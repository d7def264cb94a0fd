"""Lets test modules import the helper modules of this folder, and those of the bookie's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "services" / "bookie" / "tests"))
