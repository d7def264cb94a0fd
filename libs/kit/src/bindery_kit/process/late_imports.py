"""Import slow modules in a thread other than the one of the event loop.

A service answers its first requests before it imports what only rare requests need. Such an import runs in a thread,
because on the loop it would delay every request for tens of milliseconds:

    def import_client() -> type[LedgerClient]:
        from bindery_client.client import LedgerClient
        return LedgerClient

    client = await (await in_thread(import_client)).connect(...)

The import statement stays visible to the type checker and to the check of the layers.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(import_: Callable[[], T]) -> T:
    """Run `import_` in a thread and return its result.

    The name of the function must begin with `import_`: a simulated loop has no threads, and runs only such functions
    directly.
    """
    return await asyncio.get_running_loop().run_in_executor(None, import_)
