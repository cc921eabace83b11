"""Distributed Muon: ZeRO-1 shards on a DP x TP grid, nine moves around Newton–Schulz, and what certifies a run.

    from distmuon import DistributedMuon, Grid, launch, split_parameters

    def work(world):  # runs on every rank
        optimizer = DistributedMuon(split_parameters(model), Grid.of(world), lr=2e-3)

    launch.run(work, dp=4, tp=2)

The rooms, each importing only those before it: launch, sharding, optim, extras, models, verify. The names in
`__all__` are for everyone; each is fetched when it is first asked for, because torch takes 2 s to import and this
package should not.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

__all__ = [
    "AttentionHeads",
    "DistributedMuon",
    "Grid",
    "LocalView",
    "Metrics",
    "Muon",
    "MuonW",
    "NonFiniteGradient",
    "QKClip",
    "RankMismatchError",
    "Zero1AdamW",
    "certify",
    "checkpoint",
    "launch",
    "metrics",
    "newton_schulz",
    "plan",
    "split_parameters",
]

if sys.platform == "win32":  # before anything is imported that needs signals, fork servers or file locks
    _SENTENCE = "distmuon runs on Linux, macOS, or WSL on Windows; start this in WSL."
    _program = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
    if os.path.dirname(_program) == os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        print(f"error: {_SENTENCE}", file=sys.stderr)  # one of the workers beside this package: no traceback
        sys.exit(2)
    raise ImportError(_SENTENCE)

if TYPE_CHECKING:
    from distmuon import checkpoint, launch, metrics
    from distmuon.extras.metrics.observer import Metrics
    from distmuon.extras.qk_clip import AttentionHeads, QKClip
    from distmuon.optim.distributed_muon import DistributedMuon
    from distmuon.optim.muon import Muon
    from distmuon.optim.muonw import MuonW
    from distmuon.optim.newton_schulz import newton_schulz
    from distmuon.optim.param_groups import split_parameters
    from distmuon.optim.zero1_adamw import Zero1AdamW
    from distmuon.sharding.consistency import RankMismatchError
    from distmuon.sharding.gradients import NonFiniteGradient
    from distmuon.sharding.grid import Grid
    from distmuon.sharding.layout import plan
    from distmuon.sharding.local_views import LocalView
    from distmuon.verify.certify import certify
else:  # hidden from type checkers, to which it would say that every name exists
    _HOMES = {
        "AttentionHeads": "extras.qk_clip",
        "RankMismatchError": "sharding.consistency",
        "DistributedMuon": "optim.distributed_muon",
        "Grid": "sharding.grid",
        "LocalView": "sharding.local_views",
        "Metrics": "extras.metrics.observer",
        "Muon": "optim.muon",
        "MuonW": "optim.muonw",
        "NonFiniteGradient": "sharding.gradients",
        "QKClip": "extras.qk_clip",
        "Zero1AdamW": "optim.zero1_adamw",
        "certify": "verify.certify",
        "newton_schulz": "optim.newton_schulz",
        "plan": "sharding.layout",
        "split_parameters": "optim.param_groups",
    }

    def __getattr__(name: str) -> Any:
        """Import what is asked for, once (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
        value = globals()[name] = getattr(module, name) if name in _HOMES else module
        return value

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
