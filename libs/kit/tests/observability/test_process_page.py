"""The page of a service begins with the metrics of its process."""

from bindery_kit.observability.process_page import ProcessPage


def test_the_parts_follow_the_metrics_of_the_process_in_order() -> None:
    page = ProcessPage("kittest", lambda: b"one 1\n", lambda: b"two 2\n")
    shown = page.render()
    assert b"process_cpu_seconds_total" in shown
    assert shown.endswith(b"\none 1\ntwo 2\n")


def test_the_parts_are_rendered_anew_each_time() -> None:
    numbers = iter(range(2))
    page = ProcessPage("kittest", lambda: b"n %d\n" % next(numbers))
    assert [page.render()[-4:] for _ in range(2)] == [b"n 0\n", b"n 1\n"]


def test_the_content_type_is_that_of_bookkeeper() -> None:
    assert ProcessPage("kittest").content_type == "text/plain; version=0.0.4; charset=utf-8"
