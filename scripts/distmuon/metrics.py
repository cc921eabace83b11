"""The public names of `distmuon.extras.metrics`."""

from distmuon.extras.metrics.observer import Metrics
from distmuon.extras.metrics.writers import Console, JsonLines, TensorBoard, Writer

__all__ = ["Console", "JsonLines", "Metrics", "TensorBoard", "Writer"]
