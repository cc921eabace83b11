"""What to watch while an optimizer trains: the same numbers on one process and on any grid, written while it runs."""

from distmuon.extras.metrics.observer import Metrics
from distmuon.extras.metrics.writers import Console, JsonLines, TensorBoard, Writer

__all__ = ["Console", "JsonLines", "Metrics", "TensorBoard", "Writer"]
