"""Worlds: start the same worker function as local processes, under torchrun, or as one process; watch it, stop it.

    def work(world, steps): ...                      # runs on every rank
    results = launch.run(work, (20,), dp=4, tp=2)    # one result per rank, in rank order

This package imports torch only when a rank starts, so that a wrong argument is answered at once.
"""

from distmuon.launch.cli import (
    DEFAULT_TIMEOUT,
    WORLD,
    OutputError,
    UsageError,
    add_arguments,
    check_known,
    check_range,
    check_writable,
    choices,
    chosen_job,
    options,
    parser,
)
from distmuon.launch.start import command, is_main_process, run
from distmuon.launch.supervise import WorldError
from distmuon.launch.world import World, seconds_since, under_torchrun

__all__ = [
    "DEFAULT_TIMEOUT", "WORLD", "OutputError", "UsageError", "World", "WorldError", "add_arguments", "check_known",
    "check_range", "check_writable", "choices", "chosen_job", "command", "is_main_process", "options", "parser", "run",
    "seconds_since", "under_torchrun",
]  # fmt: skip
