"""Import structlog, msgspec and crc32c without the optional modules for which they search during their import.

| library   | searches for                                       | share of its import time |
|-----------|----------------------------------------------------|--------------------------|
| structlog | rich, for a renderer that is not used here         | half                     |
| msgspec   | typing_extensions, for names that Python also has  | nine tenths              |
| crc32c    | its own version, in the metadata of all packages   | nine tenths              |

During the import of these libraries, the modules in `INSTEAD` are missing or replaced; later imports find them. A
process must import this module before any other module of the project, or it has no effect.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Final


def _metadata_without_versions() -> ModuleType:
    module = ModuleType("importlib.metadata")
    vars(module)["version"] = lambda _name: "unknown"
    return module


INSTEAD: Final[Mapping[str, ModuleType | None]] = {
    "rich": None,
    "typing_extensions": None,
    "importlib.metadata": _metadata_without_versions(),
}
"""Module -> its replacement during the imports; None: the module is missing."""


@contextmanager
def replaced(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Replace these modules, or make them missing, unless they were already imported."""
    fresh = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(fresh)  # type: ignore[arg-type]  # None marks a missing module
    try:
        yield
    finally:
        for name in fresh:
            del sys.modules[name]


with replaced(INSTEAD):
    import crc32c
    import msgspec
    import structlog

__all__ = ["INSTEAD", "crc32c", "msgspec", "replaced", "structlog"]
