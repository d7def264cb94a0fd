"""The text format of Prometheus, line by line."""

import pytest
from bindery_kit.observability.metrics_page import Page, labels, metric_name
from bindery_kit.observability.op_stat import QUANTILES, OpStat


def text(page: Page) -> list[str]:
    return page.render().decode().splitlines()


def test_other_characters_of_a_name_become_underscores() -> None:
    assert metric_name("a.b-c/d e:f") == "a_b_c_d_e_f"
    assert metric_name("aZ_09") == "aZ_09"
    assert metric_name("ü") == "_"


def test_labels_are_quoted_and_escaped() -> None:
    assert labels({"a": "x", "b": 'q"\\\n'}) == 'a="x",b="q\\"\\\\\\n"'
    assert labels({}) == ""


def test_a_metric_has_help_type_and_samples() -> None:
    page = Page()
    page.add("bookie_x", "gauge", "What x is.", [("", 3), ('a="b"', 2.5)])
    page.add("bookie_y", "counter", "What y is.", iter([("", 1e6)]))
    assert page.render() == (
        b"# HELP bookie_x What x is.\n"
        b"# TYPE bookie_x gauge\n"
        b"bookie_x 3\n"
        b'bookie_x{a="b"} 2.5\n'
        b"# HELP bookie_y What y is.\n"
        b"# TYPE bookie_y counter\n"
        b"bookie_y 1000000\n"
    )


def test_a_metric_without_samples_is_not_shown() -> None:
    page = Page()
    page.add("x", "gauge", "x", [])
    assert page.render() == b"\n"
    page.add("x", "gauge", "x", [("", 1)])
    assert text(page)[-1] == "x 1"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (True, "1"),
        (999_999_999_999_999.0, "999999999999999"),
        (1e15, "1000000000000000.0"),
        (-1e15, "-1000000000000000.0"),
        (10**18, "1e+18"),
        (float("nan"), "NaN"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_shown_without_needless_digits(value: float, shown: str) -> None:
    page = Page()
    page.add("x", "gauge", "x", [("", value)])
    assert text(page)[-1] == f"x {shown}"


def test_a_summary_has_quantiles_count_and_sum() -> None:
    stat = OpStat(lambda: 0.0)
    page = Page()
    page.summary("op", "An operation.", [('success="true"', stat)])
    assert QUANTILES == (0.5, 0.75, 0.95, 0.99, 0.999, 0.9999, 1.0)
    assert text(page) == [
        "# HELP op An operation.",
        "# TYPE op summary",
        *(f'op{{success="true",quantile="{part}"}} NaN' for part in QUANTILES),
        'op_count{success="true"} 0',
        'op_sum{success="true"} 0',
    ]


def test_a_summary_counts_its_observations() -> None:
    stat = OpStat(lambda: 0.0)
    stat.observe(1.5, 2)
    page = Page()
    page.summary("op", "An operation.", [('success="true"', stat)])
    assert text(page)[-2:] == ['op_count{success="true"} 2', 'op_sum{success="true"} 3']
    assert 1.5 <= float(text(page)[2].split()[-1]) <= 1.65


def test_the_same_distributions_can_have_several_names() -> None:
    page = Page()
    page.summaries(("a", "b"), "Both.", iter([('success="true"', OpStat(lambda: 0.0))]))
    assert [line for line in text(page) if "_count" in line] == [
        'a_count{success="true"} 0',
        'b_count{success="true"} 0',
    ]
    assert [line for line in text(page) if line.startswith("# TYPE")] == ["# TYPE a summary", "# TYPE b summary"]


def test_a_name_is_added_once() -> None:
    page = Page()
    page.add("x", "gauge", "x", [("", 1)])
    with pytest.raises(AssertionError, match="x was already added"):
        page.add("x", "gauge", "x", [("", 1)])
