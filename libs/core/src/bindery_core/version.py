"""The version of Bindery: one number for all packages, images and the chart. `tools/set_version.py` writes it.

It is a constant, because reading it from the metadata of the installed package would take longer than all other imports
of a bookie.
"""

from typing import Final

VERSION: Final = "0.1.0"
