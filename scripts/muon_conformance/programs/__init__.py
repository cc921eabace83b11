"""Small training programs that hold an optimizer to torch's conventions."""

from muon_conformance.programs import gradients, models, states
from muon_conformance.programs.small import PROGRAMS

__all__ = ["PROGRAMS", "gradients", "models", "states"]  # each of the three adds its own to the list
