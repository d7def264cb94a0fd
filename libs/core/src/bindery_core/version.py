"""The version of everything here: one number for all packages, images and the chart. `tools/set_version.py` writes it.

A constant, since looking a version up in the metadata of what is installed takes longer than a bookie's other imports.
"""

from typing import Final

VERSION: Final = "0.1.0"
