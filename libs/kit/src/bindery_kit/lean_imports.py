"""structlog, msgspec and crc32c without what they look for at import and we have no use for.

| library   | looks for                                                 | of its import |
|-----------|-----------------------------------------------------------|---------------|
| structlog | rich, for a renderer that we do not use                   | half          |
| msgspec   | typing_extensions, for names that Python has too          | nine tenths   |
| crc32c    | its own version, in the metadata of all that is installed | nine tenths   |

While they are imported they find none of it; whoever asks afterwards does. A process imports this before anything else
of ours, or it is in vain.
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
"""Module -> what is found in its place; None: nothing."""


@contextmanager
def replaced(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Meanwhile these modules are others, or missing; but for those that were imported before."""
    fresh = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(fresh)  # type: ignore[arg-type]  # None is how Python notes a module that is missing
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
