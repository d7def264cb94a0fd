"""The memory that the clients of a broker need: when it has fallen, free memory is returned to the system."""

from bindery_kit.http.http_stats import HttpStats

from bindery_broker.dispatch.read_ahead import ReadAhead


class BrokerHttpStats(HttpStats):
    """Counters of the HTTP port of a broker."""

    def __init__(self) -> None:
        super().__init__()
        self._read_ahead: ReadAhead | None = None

    def watch_read_ahead(self, read_ahead: ReadAhead) -> None:
        """Let `needed_size` fall when messages of idle subscriptions are put down.

        Messages that are read and delivered all the time do not count: a busy broker would return memory all the time.
        """
        self._read_ahead = read_ahead

    @property
    def needed_size(self) -> int:
        """Bytes relative to those at the start; only their changes have a meaning."""
        return super().needed_size - self._idle_size

    def take_peak_size(self) -> int:
        return super().take_peak_size() - self._idle_size

    @property
    def _idle_size(self) -> int:
        return self._read_ahead.idle_size if self._read_ahead is not None else 0
