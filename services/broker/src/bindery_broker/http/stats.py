"""The memory that the clients of a broker need, its messages included: when it has fallen, memory is returned."""

from bindery_kit.http.http_stats import HttpStats

from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.subscriptions.response_budget import ResponseBudget


class BrokerHttpStats(HttpStats):
    """Counters of the HTTP port of a broker."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: tuple[ReadAhead | ResponseBudget, ...] = ()

    def watch_messages(self, *messages: ReadAhead | ResponseBudget) -> None:
        """Count these budgets as memory that clients need."""
        self._messages = messages

    @property
    def needed_size(self) -> int:
        return super().needed_size + sum(budget.used for budget in self._messages)
