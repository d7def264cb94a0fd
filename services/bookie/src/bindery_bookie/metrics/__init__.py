"""Metrics of a bookie, in the text format of Prometheus."""

from bindery_kit.observability.op_stat import QUANTILES, WINDOW_S, Operation, OpStat

from bindery_bookie.metrics.bookie import OPERATIONS, BookieMetrics, DirectoryUsage

__all__ = ["OPERATIONS", "QUANTILES", "WINDOW_S", "BookieMetrics", "DirectoryUsage", "OpStat", "Operation"]
