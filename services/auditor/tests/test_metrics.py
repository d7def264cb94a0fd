"""AuditorMetrics: the parts of the page before and after the start of recovery."""

from bindery_auditor.metrics import AuditorMetrics
from bindery_kit.observability.metrics_page import Page


class Part:
    """Adds one metric."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add_to(self, page: Page) -> None:
        page.add(self.name, "gauge", "For the test.", [("", 1)])


def names(metrics: AuditorMetrics) -> list[str]:
    return [line.split()[0] for line in metrics.render().decode().splitlines() if line and not line.startswith("#")]


def test_the_page_is_empty_until_there_is_a_session() -> None:
    assert names(AuditorMetrics()) == []


def test_each_part_adds_its_metrics_as_soon_as_it_exists() -> None:
    metrics = AuditorMetrics()
    metrics.recovery = Part("recovery")  # type: ignore[assignment]
    assert names(metrics) == ["recovery"]
    metrics.last_audits = Part("last_audits")  # type: ignore[assignment]
    assert names(metrics) == ["recovery", "last_audits"]
    metrics.recovery = None
    assert names(metrics) == ["last_audits"]
