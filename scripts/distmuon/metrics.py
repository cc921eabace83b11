"""The public name of `distmuon.extras.metrics`."""

from distmuon.extras.metrics import Console, JsonLines, Metrics, TensorBoard, Writer

__all__ = ["Console", "JsonLines", "Metrics", "TensorBoard", "Writer"]
