"""Page: metrics in the text format of Prometheus, without Prometheus' own library.

That library appends `_total` to every counter. BookKeeper's names do not have it, and dashboards use the exact names.

| shape   | lines                                                                                 |
|---------|---------------------------------------------------------------------------------------|
| gauge   | `name{labels} value`                                                                  |
| counter | the same; it only grows                                                               |
| summary | `name{success,quantile} value` per quantile, `name_count{success}`, `name_sum{...}`   |

Labels are given in the form between the braces. Source: Prometheus, text format 0.0.4.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from bindery_kit.observability.op_stat import QUANTILES, OpStat

_NOT_A_NAME: Final = re.compile(r"[^A-Za-z0-9_]")
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metric_name(text: str) -> str:
    """Return `text` as part of a metric's name: other characters become `_`, as in BookKeeper."""
    return _NOT_A_NAME.sub("_", text)


def labels(pairs: Mapping[str, str]) -> str:
    """Return labels in the form between the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs.items())


class Page:
    """Metrics in the order in which they were added. Invariant: a name is added once, with all its samples."""

    def __init__(self) -> None:
        self._families: list[bytes] = []
        self._names: set[str] = set()

    def add(self, name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> None:
        """Add a metric. `samples`: (labels, value). `kind`: gauge or counter. Without samples nothing is added."""
        lines = [f"{name}{{{at}}} {_number(value)}" if at else f"{name} {_number(value)}" for at, value in samples]
        if lines:
            self._family(name, kind, help, lines)

    def summary(self, name: str, help: str, stats: Iterable[tuple[str, OpStat]]) -> None:
        """Add a summary. `stats`: (labels, distribution)."""
        self.summaries((name,), help, stats)

    def summaries(self, names: Iterable[str], help: str, stats: Iterable[tuple[str, OpStat]]) -> None:
        """Add the same distributions under several names."""
        shown = [(at, stat.quantiles(), stat.count, stat.sum) for at, stat in stats]
        for name in names:
            lines: list[str] = []
            for at, quantiles, count, total in shown:
                lines += [
                    f'{name}{{{at},quantile="{part}"}} {_number(value)}'
                    for part, value in zip(QUANTILES, quantiles, strict=True)
                ]
                lines.append(f"{name}_count{{{at}}} {count}")
                lines.append(f"{name}_sum{{{at}}} {_number(total)}")
            self._family(name, "summary", help, lines)

    def render(self) -> bytes:
        return b"".join(self._families) or b"\n"

    def _family(self, name: str, kind: str, help: str, lines: list[str]) -> None:
        assert name not in self._names, f"{name} was already added"
        self._names.add(name)
        # Encoded here, not in `render`, which would take long for a page of many megabytes.
        self._families.append("\n".join((f"# HELP {name} {help}", f"# TYPE {name} {kind}", *lines, "")).encode())


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
