"""What chapter 14 measures for book/results: three schedules of Muon's step, gradients and parameters that travel under
the passes, and one bucket against a call per matrix.

obstacle: why ranks have no networks of their own; None if they have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distmuon import launch
from muonbook import network_emulation
from muonbook.ch14.experiments import race_gathers, race_hiding, race_schedules, record_steps
from muonbook.measure.workload import TIMED

RATES = (250.0, 500.0, 1000.0, 2000.0, 4000.0)  # Mbit/s: from sending far longer than working to about as long
RECORDED = 2000.0  # the one whose traces are stored: sending takes little longer than working
HIDING_RATES = (500.0, 1000.0, 2000.0, 4000.0, None)  # Mbit/s; None: unlimited
BATCHED = replace(TIMED, sequences=16)  # on two ranks: passes take about as long as their gradients on the third link
PATIENCE = 60.0  # seconds that a collective waits


def measure_schedules(quick: bool, obstacle: str | None) -> dict[str, Any]:
    """Race schedules, and record them and a training step. "files": name of a file -> the trace that it holds."""
    rounds, recordings = (6, 1) if quick else (30, 9)
    found: dict[str, Any] = {
        "workload": {"width": TIMED.width, "layers": TIMED.layers, "bucket_size": TIMED.bucket_size}
    }
    files = dict[str, Any]()
    print("Racing three schedules over loopback, 2 x 1 and 2 x 2 ranks ...", flush=True)
    for name, asleep in (("loopback", False), ("loopback_asleep", True)):
        job = (TIMED, rounds, recordings, asleep)
        found[name] = launch.run(race_schedules, job, dp=2, timeout=PATIENCE)[0]
        found[name].pop("traces")
    found["loopback_2x2"] = launch.run(race_schedules, (TIMED, rounds // 2, 0), dp=2, tp=2, timeout=PATIENCE)[0]
    found["links"], found["links_asleep"] = {}, {}
    for rate in () if obstacle else RATES:
        print(f"The same over a link of {rate:g} Mbit/s, 2 x 1 ranks ...", flush=True)
        for name, asleep in (("links", False), ("links_asleep", True)):
            job, link = (TIMED, rounds * 2 // 3, recordings, asleep), network_emulation.Link(rate)
            found[name][f"{rate:g}"] = raced = network_emulation.run(
                race_schedules, job, dp=2, link=link, timeout=PATIENCE
            )[0]
            for schedule, merged in raced.pop("traces").items():
                if rate == RECORDED:
                    files[f"schedule_{schedule}{'_asleep' if asleep else ''}.json.gz"] = merged
    print("Recording a training step of AdamW and one of Muon on 2 x 2 ranks ...", flush=True)
    steps = launch.run(record_steps, (recordings,), dp=2, tp=2, timeout=PATIENCE)[0]
    files |= {f"step_{name}.json.gz": step.trace for name, step in steps.items()}
    return found | {"files": files}


def measure_hiding(quick: bool, obstacle: str | None) -> dict[str, Any]:
    """Race training steps that hide gradients and parameters on several links."""
    found: dict[str, Any] = {"workload": {"width": TIMED.width, "layers": TIMED.layers, "tokens": BATCHED.tokens}}
    found["links"] = {}
    for rate in (None,) if obstacle else HIDING_RATES:
        name = "no limit" if rate is None else f"{rate:,g} Mbit/s"
        link, job = None if obstacle else network_emulation.Link(rate), (BATCHED, 2 if quick else 12)
        print(f"Racing over {name} ...", flush=True)
        found["links"][name] = network_emulation.run(race_hiding, job, dp=2, link=link, timeout=PATIENCE)[0]
    return found


def measure_gathers(quick: bool) -> dict[str, Any]:
    """Race one bucket against a call per matrix, over DP and over TP."""
    raced = dict[str, Any]()
    for dp, tp in ((2, 1), (1, 2)):
        raced |= launch.run(race_gathers, (6 if quick else 60,), dp=dp, tp=tp)[0]
    return {"workload": {"ranks": 2, "matrices": 12, "dtype": "bfloat16"}, "bucket_to_single": raced}
