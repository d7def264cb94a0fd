"""Modules of this folder find one another."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
