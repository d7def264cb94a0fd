"""Modules are replaced during an import only, and never if they were imported before."""

import sys
from types import ModuleType

import pytest
from bindery_kit import lean_imports
from bindery_kit.lean_imports import INSTEAD, replaced

ABSENT = "bindery_no_such_module"
OTHER = "bindery_no_such_module_either"


def test_a_module_is_missing_within_the_block_and_as_before_after_it() -> None:
    with replaced({ABSENT: None}):
        assert sys.modules[ABSENT] is None
        with pytest.raises(ModuleNotFoundError, match="halted"):
            __import__(ABSENT)
    assert ABSENT not in sys.modules


def test_a_replacement_is_imported_within_the_block() -> None:
    module = ModuleType(ABSENT)
    with replaced({ABSENT: module, OTHER: None}):
        assert __import__(ABSENT) is module
    assert ABSENT not in sys.modules
    assert OTHER not in sys.modules


def test_a_module_that_was_imported_already_stays() -> None:
    with replaced({"sys": None, "json": ModuleType("json")}):
        assert sys.modules["sys"] is sys
        import json

        assert json.loads("1") == 1
    assert sys.modules["sys"] is sys


def test_modules_come_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), replaced({ABSENT: None}):
        raise ZeroDivisionError
    assert ABSENT not in sys.modules


def test_these_modules_are_replaced() -> None:
    metadata = INSTEAD["importlib.metadata"]
    assert metadata is not None
    assert metadata.version("crc32c") == "unknown"
    assert {name: module for name, module in INSTEAD.items() if module is not metadata} == {
        "rich": None,
        "typing_extensions": None,
    }


def test_the_libraries_work() -> None:
    assert lean_imports.crc32c.crc32c(b"123456789") == 0xE3069283
    assert lean_imports.msgspec.json.decode(b"[1]") == [1]
    assert callable(lean_imports.structlog.get_logger)
