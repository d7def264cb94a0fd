"""An import in a thread returns its result and raises its error on the loop."""

import threading

import pytest
from bindery_kit.process.late_imports import in_thread


async def test_the_import_runs_in_another_thread() -> None:
    def import_nothing() -> int:
        return threading.get_ident()

    assert await in_thread(import_nothing) != threading.get_ident()


async def test_the_result_is_returned() -> None:
    def import_decoder() -> type:
        from json import JSONDecoder

        return JSONDecoder

    assert (await in_thread(import_decoder))().decode("[1]") == [1]


async def test_an_error_of_the_import_is_raised() -> None:
    def import_missing() -> None:
        import bindery_no_such_module  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="bindery_no_such_module"):
        await in_thread(import_missing)
