"""Chapter 14: record a DP x TP training step of AdamW and of Muon, and race three schedules of Muon's step.

python scripts/14_traces.py --dp 2 --tp 2 --traces out
python scripts/14_traces.py --schedules --dp 2 --tp 2
python scripts/14_traces.py --hiding --dp 2 --tp 2
python scripts/14_traces.py --measure --json book/results/traces.json
python scripts/14_traces.py --measure-hiding --json book/results/hiding.json
python scripts/14_traces.py --measure-gathers --json book/results/gathers.json
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from distmuon import launch
from muonbook import network_emulation
from muonbook.ch14 import puzzle as look_ahead
from muonbook.jobs import check_measurement, run_job
from muonbook.measure import results, trace
from muonbook.measure.workload import SHAPES, TIMED
from muonbook.puzzles import add_arguments, handle

RATES = (250.0, 500.0, 1000.0, 2000.0, 4000.0)  # Mbit/s: from sending far longer than working to about as long
RECORDED = 2000.0  # the one whose traces are stored: sending takes little longer than working
SMALL = replace(SHAPES["even"], bucket_size=20_011)  # more bucket groups
TAKES = {  # job -> its options
    "": launch.WORLD,
    "--traces": launch.WORLD,
    "--schedules": launch.WORLD,
    "--hiding": launch.WORLD,
    "--measure": ("quick", "json", "threads"),
    "--measure-hiding": ("quick", "json", "threads"),
    "--measure-gathers": ("quick", "json", "threads"),
}
HIDING_RATES = (500.0, 1000.0, 2000.0, 4000.0, None)  # Mbit/s; None: unlimited
BATCHED = replace(TIMED, sequences=16)  # on two ranks: passes take about as long as their gradients on the third link
RECORD, RACE = "muonbook.ch14.experiments:record_steps", "muonbook.ch14.experiments:race_schedules"
RACE_HIDING, RACE_GATHERS = "muonbook.ch14.experiments:race_hiding", "muonbook.ch14.experiments:race_gathers"


def bridged():
    """Set up the bridge of emulated links, before any rank exists: they inherit it. Say why not, where it cannot be."""
    obstacle = network_emulation.why_unavailable()
    if obstacle is None:
        network_emulation.setup_bridge()
    else:
        print(obstacle)
    return obstacle is None


def measure_hiding(path, quick, threads):
    """Race training steps that hide gradients and parameters on several links, and write the ratios."""
    links = bridged()
    found: dict[str, Any] = {"workload": {"width": TIMED.width, "layers": TIMED.layers, "tokens": BATCHED.tokens}}
    found["links"] = {}
    for rate in HIDING_RATES if links else (None,):
        name = "no limit" if rate is None else f"{rate:,g} Mbit/s"
        link = network_emulation.Link(rate) if links else None
        job = (BATCHED, 2 if quick else 12)
        print(f"Racing over {name} ...", flush=True)
        found["links"][name] = network_emulation.run(RACE_HIDING, job, dp=2, link=link, threads=threads, timeout=60.0)[
            0
        ]
    results.write(path, found)


def measure_gathers(path, quick, threads):
    """Race one bucket against a call per matrix, over DP and over TP, and write the ratios."""
    raced = dict[str, Any]()
    for dp, tp in ((2, 1), (1, 2)):
        raced |= launch.run(RACE_GATHERS, (6 if quick else 60,), dp=dp, tp=tp, threads=threads)[0]
    results.write(path, {"workload": {"ranks": 2, "matrices": 12, "dtype": "bfloat16"}, "bucket_to_single": raced})


def measure(path, quick, threads):
    """Take the stored measurements of schedules and traces; write them, and the traces beside them."""
    rounds, recordings = (6, 1) if quick else (30, 9)
    folder, options = Path(path).parent, dict(threads=threads, timeout=60.0)
    links = bridged()
    found: dict[str, Any] = {
        "workload": {"width": TIMED.width, "layers": TIMED.layers, "bucket_size": TIMED.bucket_size}
    }
    print("Racing three schedules over loopback, 2 x 1 and 2 x 2 ranks ...", flush=True)
    for name, asleep in (("loopback", False), ("loopback_asleep", True)):
        found[name] = launch.run(RACE, (TIMED, rounds, recordings, asleep), dp=2, **options)[0]
        found[name].pop("traces")
    found["loopback_2x2"] = launch.run(RACE, (TIMED, rounds // 2, 0), dp=2, tp=2, **options)[0]
    found["links"], found["links_asleep"] = {}, {}
    for rate in RATES if links else ():
        print(f"The same over a link of {rate:g} Mbit/s, 2 x 1 ranks ...", flush=True)
        for name, asleep in (("links", False), ("links_asleep", True)):
            job = (TIMED, rounds * 2 // 3, recordings, asleep)
            raced = network_emulation.run(RACE, job, dp=2, link=network_emulation.Link(rate), **options)[0]
            found[name][f"{rate:g}"] = raced
            recorded = raced.pop("traces")
            for schedule, merged in recorded.items() if rate == RECORDED else ():
                file = f"schedule_{schedule}{'_asleep' if asleep else ''}.json.gz"
                trace.save(merged | results.made_by(), folder / file)
    print("Recording a training step of AdamW and one of Muon on 2 x 2 ranks ...", flush=True)
    for name, step in launch.run(RECORD, (recordings,), dp=2, tp=2, **options)[0].items():
        trace.save(step.trace | results.made_by(), folder / f"step_{name}.json.gz")
    results.write(path, found)


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=2, tp=2)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--traces", metavar="FOLDER", help="write each recorded step's trace into this folder")
    job.add_argument("--schedules", action="store_true", help="compare what three schedules of a step do")
    job.add_argument("--hiding", action="store_true", help="train with gradients and parameters hidden under passes")
    job.add_argument("--measure", action="store_true", help="take the measurements of book/results/traces.json")
    job.add_argument("--measure-hiding", action="store_true", help="take those of book/results/hiding.json")
    job.add_argument("--measure-gathers", action="store_true", help="take those of book/results/gathers.json")
    parser.add_argument("--quick", action="store_true", help="with a measurement: few rounds, for a first impression")
    parser.add_argument("--json", metavar="FILE", help="with a measurement: write the results here, traces beside them")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, look_ahead.PUZZLE)) is not None:
        return code
    job = launch.chosen_job(arguments, TAKES)
    take = {"--measure": measure, "--measure-hiding": measure_hiding, "--measure-gathers": measure_gathers}.get(job)
    if take:
        check_measurement(arguments, job)
        take(arguments.json, arguments.quick, arguments.threads)
        return 0
    if launch.is_main_process():
        for name in ("adamw", "muon") if arguments.traces else ():
            launch.check_writable("--traces", str(Path(arguments.traces) / f"step_{name}.json.gz"))
    if arguments.dp * arguments.tp == 1:
        raise launch.UsageError("--dp 1 --tp 1: one rank sends nothing; choose 2 or more.")
    SHAPES["even"].shared_by(arguments.dp).check(arguments.dp, arguments.tp)
    if arguments.schedules:
        return run_job(arguments, "muonbook.ch14.experiments:compare_schedules", (SMALL,), report="report_schedules")
    if arguments.hiding:
        return run_job(arguments, "muonbook.ch14.experiments:compare_hiding", (SMALL,), report="report_hiding")
    return run_job(arguments, RECORD, (), arguments.traces, report="report_steps")


if __name__ == "__main__":
    launch.command(main)
