"""Metrics of a training, written while it runs; and a page of plots of them."""

from shardcore.metrics.collect import Metrics

__all__ = ["Metrics"]
