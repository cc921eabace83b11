"""Read profiler traces: how long each rank communicated, computed, did both, and waited for others.

A trace is what torch.profiler exports (.json or .json.gz, from one rank), or several ranks merged by chapter 14's
worker. Every collective is counted once; times are unions of intervals, in milliseconds. Give the traces of all ranks
of one run, and waiting is told apart from transfer; from a single rank it cannot be known.

python scripts/tools read_trace out/trace.json.gz
python scripts/tools read_trace out/report-traces/*.json --json out/report_traces.json
"""

import re
from pathlib import Path

from distmuon import launch
from muonbook.measure import results
from muonbook.measure.trace import read
from muonbook.measure.trace_report import by_group, clocks_disagree, matched_by_name, meetings, runs, summarize

from muonbook.measure.trace_report import MS, hull, optimizer_times, range_times, union  # isort: skip

JOINED = 0.1  # ms: work that pauses for less is one stretch
COLUMNS = {"communication": "comm.", "communication_sum": "comm. sum", "computation": "comp."}
COLUMNS |= {name: name for name in ("overlap", "exposed", "busy", "span", "idle")}
PAUSES = ("longest_pause", "span_without_pause")
MEANS = ("name_matched", "communication", "computation", "busy", "span", *PAUSES)  # of a run, over its ranks


def stem(path):
    """Return a trace's name: the file's, without folder and endings."""
    return Path(path).name.removesuffix(".gz").removesuffix(".json")


def in_ms(**times):
    """Return times under the names of a results file: `span` as span_ms; None, where there is none, stays."""
    return {f"{name}_ms": None if time is None else round(time, 3) for name, time in times.items()}


def host_and_gpu(times):
    return {"cpu": times.host, "gpu": times.gpu, "gpu_computing": times.computing}


def timeline(trace):
    """Return [start, end] of all stretches of work, and [start, end, ranks] of all collectives, ms from the first."""
    working = [activity.interval for activity in trace.computation]
    begin, _ = hull([*working, *(collective.when.interval for collective in trace.collectives)])
    stretches: list[list[float]] = []
    for start, end in ([round(MS * (moment - begin), 2) for moment in stretch] for stretch in union(working)):
        if stretches and start - stretches[-1][1] < JOINED:
            stretches[-1][1] = end
        else:
            stretches.append([start, end])
    sent = []
    for collective in sorted(trace.collectives, key=lambda one: one.when.start):
        start, end = (round(MS * (moment - begin), 2) for moment in collective.when.interval)
        sent.append([start, end, list(collective.group or ())])
    return {"work": stretches, "collectives": sent}


def as_json(trace):
    """Return one rank's numbers for a results file."""
    summary, parts = summarize(trace), matched_by_name(trace)
    optimizer = {f"optimizer_{name}": time for name, time in host_and_gpu(optimizer_times(trace)).items()}
    return {
        "rank": trace.rank,
        "device": trace.device,
        "collectives": summary.collectives,
        **in_ms(
            **{name: getattr(summary, name) for name in (*COLUMNS, *PAUSES)},
            name_matched=sum(time for _, time in parts),
        ),
        "name_matched_parts": [{"events": name, "ms": round(time, 3)} for name, time in parts],
        **in_ms(**optimizer),
        "ranges": [
            {"name": name, "calls": times.calls} | in_ms(**host_and_gpu(times))
            for name, times in range_times(trace).items()
        ],
        "timeline": timeline(trace),
    }


def waiting_json(names, met):
    """Return who waited for whom, per group, for a results file. names: rank -> name of its trace."""
    found = []
    for mine in by_group(met):
        group = mine[0].group
        per_rank = []
        for rank in group:
            waiting, transfer = (sum(getattr(m, part)[rank] for m in mine) for part in ("waiting", "transfer"))
            inside = in_ms(inside=waiting + transfer, waiting=waiting, transfer=transfer)
            per_rank.append({"rank": rank, "trace": names[rank]} | inside)
        clocks = round(clocks_disagree(mine), 3)
        row = {"group": list(group), "name": mine[0].collective.name, "collectives": len(mine), "ranks": per_rank}
        found.append(row | {"clocks_disagree_ms": clocks})
    return found


def runs_json(traces, together, waiting):
    """Return the mean over ranks of every run of several ranks, for a results file.

    traces: `as_json` by name. together: names of a run's traces, by rank. waiting: `waiting_json`'s rows of all runs.
    """
    found = []
    for names in (names for names in together if len(names) > 1):
        mine = set(names.values())
        inside = [rank for row in waiting for rank in row["ranks"] if rank["trace"] in mine]
        total = {f"{key}_ms": sum(traces[name][f"{key}_ms"] for name in mine) for key in MEANS}
        total |= {key: sum(rank[key] for rank in inside) if inside else None for key in ("waiting_ms", "transfer_ms")}
        means = {key: None if value is None else round(value / len(mine), 3) for key, value in total.items()}
        run = re.sub(r"_rank\d+$", "", names[min(names)])
        found.append({"run": run, "ranks": sorted(names)} | means)
    return found


def table(traces):
    """Return one line per trace. traces: {name: RankTrace}."""
    width = max(len(name) for name in traces)
    lines = [f"{'ms':{width}s} {'calls':>6s}" + "".join(f"{head:>11s}" for head in COLUMNS.values())]
    for name, trace in traces.items():
        summary = summarize(trace)
        numbers = "".join(f"{getattr(summary, column):11.2f}" for column in COLUMNS)
        lines.append(f"{name:{width}s} {summary.collectives:6d}{numbers}")
    return lines


def remarks(name, trace):
    """Return what else a trace says: the optimizer on host and GPU, and what name matching would have counted."""
    lines, optimizer = [f"{name}:"], optimizer_times(trace)
    if optimizer.calls:
        on_gpu = "" if optimizer.gpu is None else f", GPU {optimizer.gpu:.2f} (computing {optimizer.computing:.2f})"
        lines.append(f"  optimizer steps: host {optimizer.host:.2f}{on_gpu}")
    if parts := matched_by_name(trace):
        told = " + ".join(f"{time:.2f}" for _, time in parts)
        lines.append(f"  all events whose names match a collective: {sum(time for _, time in parts):.2f} = {told}")
    return lines if len(lines) > 1 else []


def waiting_lines(names, traces):
    """Return the waiting table of one run, or why there is none."""
    met = meetings(traces)
    ranks = ", ".join(str(trace.rank) for trace in traces)
    if not met:
        alone = len(traces) == 1
        why = "one rank's trace cannot tell" if alone else "no group is complete, or the profiler does not name groups"
        where = names[traces[0].rank] if alone else f"ranks {ranks}"
        return [f"Waiting, {where}: not known; {why}. The time of a kernel is not waiting, and not transfer either."]
    lines = [f"Waiting, ranks {ranks}: inside = waiting for the last rank to arrive + transfer after that"]
    lines.append(f"  {'group':20s}{'calls':>6s}{'rank':>6s}{'inside':>11s}{'waiting':>11s}{'transfer':>11s}")
    for row in waiting_json(names, met):
        group = f"{row['name']} {row['group']}".strip()
        for rank in row["ranks"]:
            numbers = "".join(f"{rank[key]:11.2f}" for key in ("inside_ms", "waiting_ms", "transfer_ms"))
            lines.append(f"  {group:20s}{row['collectives']:6d}{rank['rank']:6d}{numbers}")
    if clocks := clocks_disagree(met):
        lines.append(f"  The ranks' clocks disagree by up to {clocks:.3f}: waiting is known no better than that.")
    return lines


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a trace, .json or .json.gz")
    parser.add_argument("--json", metavar="OUT", help="write the numbers here")
    arguments = parser.parse_args()
    launch.check_writable("--json", arguments.json)
    return arguments


def main():
    arguments = parse()
    files = {stem(path): read(path) for path in arguments.files}
    named = {
        name if len(traces) == 1 else f"{name}_rank{trace.rank}": trace
        for name, traces in files.items()
        for trace in traces
    }
    name_of = {id(trace): name for name, trace in named.items()}
    together = [({trace.rank: name_of[id(trace)] for trace in run}, run) for run in runs(list(files.values()))]

    print("\n".join(table(named)))
    for name, trace in named.items():
        print("\n".join(["", *remarks(name, trace)]).rstrip())
    for names, run in together:
        print("\n".join(["", *waiting_lines(names, run)]))
    if arguments.json:
        command = ["tools read_trace", *(Path(path).name for path in [*arguments.files, "--json", arguments.json])]
        waiting = [row for names, run in together for row in waiting_json(names, meetings(run))]
        found = {"traces": {name: as_json(trace) for name, trace in named.items()}, "waiting": waiting}
        found["runs"] = runs_json(found["traces"], [names for names, _ in together], waiting)
        results.write(arguments.json, {"command": " ".join(command)} | found)
