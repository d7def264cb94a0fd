"""The judgement of bench/spark_kills.py finds each fault of the topics that a killed job has written."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "spark_kills.py"

Rows = list[dict[str, Any]]


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bindery_bench_spark_kills", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_bench()
COUNT = 60


def orders() -> Rows:
    return [
        {"message_id": f"1:{n}:-1:-1", "customer": f"c{n % bench.CUSTOMERS}", "amount": float(n), "large": n >= 100}
        for n in range(COUNT)
    ]


def totals() -> Rows:
    """The totals after 40 and after 60 orders."""
    return [
        {
            "customer": f"c{c}",
            "orders": upto // bench.CUSTOMERS,
            "total": float(sum(range(c, upto, bench.CUSTOMERS))),
        }
        for upto in (40, COUNT)
        for c in range(bench.CUSTOMERS)
    ]


def test_what_is_exactly_once_is_good() -> None:
    assert bench.judge_orders(orders(), COUNT) == []
    assert bench.judge_totals(totals(), COUNT) == []


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda rows: rows.pop(7), "order 7 is missing"),
        (lambda rows: rows.append({**rows[7], "message_id": "2:0"}), "order 7 is there 2 times"),
        (lambda rows: rows.append({**rows[7], "amount": 60.0, "message_id": "2:0"}), "order 60 was not sent"),
        (lambda rows: rows.append(rows.pop(7)), "the orders of c7 are not in their order"),
        (lambda rows: rows[7].update(large=True), "not enriched"),
        (lambda rows: rows[7].update(message_id=rows[8]["message_id"]), "a message id is there twice"),
    ],
    ids=["missing", "twice", "invented", "order", "not enriched", "message id"],
)
def test_each_fault_of_the_orders_is_found(fault: Callable[[Rows], object], finding: str) -> None:
    rows = orders()
    fault(rows)
    assert any(found.startswith(finding) for found in bench.judge_orders(rows, COUNT))


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda rows: rows.pop(), "the last total of c19 has 2 of 3 orders"),
        (lambda rows: rows.insert(20, rows[3]), "comes after a total of 2 orders"),
        (lambda rows: rows.append(rows.pop(3)), "comes after a total of 3 orders"),
        (lambda rows: rows[3].update(total=rows[3]["total"] + 1), "the first 2 orders make 26"),
        (lambda rows: rows[23].update(orders=4), "there are not so many orders"),
        (lambda rows: rows[23].update(customer="x"), "there are not so many orders"),
    ],
    ids=["missing", "twice", "order", "sum", "too many", "no customer"],
)
def test_each_fault_of_the_totals_is_found(fault: Callable[[Rows], object], finding: str) -> None:
    rows = totals()
    fault(rows)
    assert any(finding in found for found in bench.judge_totals(rows, COUNT))
