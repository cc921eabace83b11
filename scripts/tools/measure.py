"""Take one measurement and write it: what `make bench` starts, each in a process of its own.

Chapters read the results from book/results; their workers show a reader one run. Some results go with traces, which are
written beside them.

python scripts/tools measure bytes --json book/results/bytes.json
python scripts/tools measure regimes --quick --json out/quick/regimes.json
PEERS=../peers python scripts/tools measure step --json book/results/step.json
"""

import importlib
import os
from pathlib import Path

from distmuon import launch
from muonbook import jobs, network_emulation
from muonbook.measure import results

# A measurement -> the function that takes it, given `quick`. Named, not imported: a bridge has to come before torch.
OF_4 = {
    "step_times": "muonbook.ch04.stored:step_times",
    "sights": "muonbook.ch04.stored:sights",
    "blocks": "muonbook.ch04.stored:blocks",
    "writing": "muonbook.ch04.stored:write",
    "learning": "muonbook.ch04.stored:learning",
}
TAKERS = OF_4 | {
    "bytes": "muonbook.ch12.byte_counts:measure",
    "memory": "muonbook.ch13.memory_study:measure",
    "traces": "muonbook.ch14.stored:measure_schedules",
    "hiding": "muonbook.ch14.stored:measure_hiding",
    "gathers": "muonbook.ch14.stored:measure_gathers",
    "regimes": "muonbook.ch15.regimes:measure",
    "worlds": "muonbook.ch15.survey:survey",
    "step": "muonbook.ch16.race.step_race:measure",
    "muonw": "muonbook.ch17.costs:measure",
    "divisions": "muonbook.ch18.divisions:survey",
    "claims": "tools.claims:measure",
    "conformance": "muonbook.ch17.kit.conformance_bench:measure",
    "ns_coefficients": "tools.ns_coefficients:measure",
    "one_line": "tools.one_line:measure",
    "variant_costs": "tools.variant_costs:measure",
    "step_ratios": "tools.step_ratios:measure",
}
OVER_LINKS = ("bytes", "traces", "hiding", "regimes")  # which are also given why ranks have no networks, or None


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(TAKERS)}")
    parser.add_argument("--quick", action="store_true", help="a first impression: few rounds, grids and worlds")
    parser.add_argument("--json", metavar="FILE", required=True, help="write what was measured here")
    arguments = parser.parse_args()
    if arguments.name not in TAKERS:
        raise launch.UsageError(f"there is no measurement {arguments.name!r}; there are {', '.join(TAKERS)}.")
    jobs.check_measurement(arguments, "measure")
    given = [arguments.quick]
    if arguments.name in OVER_LINKS:
        given.append(bridged())
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # its profiler talks
    module, function = TAKERS[arguments.name].split(":")
    found = getattr(importlib.import_module(module), function)(*given)
    for file, trace in found.pop("files", {}).items():
        from muonbook.measure.trace import save

        save(trace | results.made_by(), Path(arguments.json).parent / file)
    results.write(arguments.json, found)


def bridged():
    """Set up the bridge of emulated links, before any rank exists: they inherit it. Return why not, if it cannot be."""
    obstacle = network_emulation.why_unavailable()
    if obstacle is None:
        network_emulation.setup_bridge()
    else:
        print(f"Links are left out: {obstacle}")
    return obstacle
