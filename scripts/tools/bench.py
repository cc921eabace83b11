"""Take every measurement of the book that this machine permits, and redraw what shows them: `make bench`.

Each measurement is a process of its own and writes its own file, one after the other, so that none disturbs another.
One that fails is named at the end, and its file stays as it was. A first impression (--quick) goes to out/quick and
redraws nothing.

python scripts/tools bench
python scripts/tools bench bytes regimes
python scripts/tools bench --quick
"""

import os
import subprocess
import sys
import time

from distmuon import launch
from muonbook import network_emulation
from muonbook.measure import results
from tools import measure

QUICK = "out/quick"
RACE = "04_does_it_learn.py"
LEARNING = {  # of chapter 4; where the images of fashion or mnist were not fetched, that is said
    "race_digits": (RACE, "--task", "digits"),
    "race_language": (RACE, "--task", "language"),
    "race_fashion": (RACE, "--task", "fashion", "--if-here"),
    "race_variants": (RACE, "--task", "language", "--variants", "--tune", "lr", "--steps", "1000"),
    "race_normuon": (RACE, "--task", "language", "--optimizer", "muon", "normuon", "--tune", "lr", "--steps", "1000"),
    "originals": (RACE, "--recipe", "original", "--task", "fashion", "mnist", "--if-here"),
    **{name: ("tools", "measure", name) for name in measure.OF_4},
}
MEASUREMENTS = {  # name, and that of its file in book/results -> what measures it
    **{name: ("tools", "measure", name) for name in measure.TAKERS if name not in LEARNING},
    "planner": ("plan.py", "--measure"),
    "drills": ("18_beyond_one_machine.py", "--drill", "all"),
    "chapters": ("tools", "time_chapters"),
    **LEARNING,
}
SHORT = ("drills", "chapters")  # which have no --quick
# No chapter shows them but in its first cell, whose line is not compared; `make book` fills in pages of prose.
UNDRAWN = {"claims", "chapters", "ns_coefficients", "one_line", "step_ratios", "variant_costs"}
OF_16, OF_17 = {"step", "blocks"}, {"muonw", "conformance"}  # which chapters 16 and 17 show
OF_18 = {"drills", "divisions", "planner"}
CHAPTERS = ("12", "13", "14", "15")  # whose pages show the rest


def command(name, quick):
    """Return the command that takes this measurement."""
    script, *options = MEASUREMENTS[name]
    target = results.ROOT / QUICK if quick else results.FOLDER
    options += ["--quick"] * (quick and name not in SHORT)
    options += ["--json", str((target / f"{name}.json").relative_to(results.ROOT))]
    return [f"scripts/{script}", *options]


def redrawing(names):
    """Return name -> command of what redraws pages and figures from these results."""
    if set(names) <= UNDRAWN:
        return {}
    others = set(names) - LEARNING.keys() - UNDRAWN - OF_16 - OF_17 - OF_18
    chapters = [*(["04"] if set(names) & LEARNING.keys() else []), *(CHAPTERS if others else [])]
    chapters += [chapter for chapter, own in (("16", OF_16), ("17", OF_17), ("18", OF_18)) if set(names) & own]
    return {
        "chapters": ["scripts/tools", "run_notebooks", *chapters],
        "pictures of pages": ["scripts/tools", "draw_pages"],
    }


def take(jobs):
    """Run the commands, name -> words after `python`, in order; return the names of those that failed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # chapters say `python`
    failed = []
    for number, (name, words) in enumerate(jobs.items(), 1):
        print(f"[{number}/{len(jobs)}] {name}: python {' '.join(words)}", flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, *words], cwd=results.ROOT, env={**os.environ, "PATH": path})
        failed += [name] if done.returncode else []
        how = f"failed with exit code {done.returncode} after" if done.returncode else "took"
        print(f"[{number}/{len(jobs)}] {name}: {how} {time.monotonic() - began:.0f} s\n", flush=True)
    return failed


def warnings(quick):
    """Yield a sentence for each thing that will be missing from the results, before hours are spent on them."""
    obstacle = network_emulation.why_unavailable()
    if obstacle is not None:
        yield f"Without a network of its own for every rank, some numbers stay unmeasured: {obstacle}"
    commit = results.commit()
    if not quick and (commit is None or commit.endswith("-dirty")):
        why = "there is no clone here" if commit is None else "the code differs from it"
        yield f"The results will not name a commit that made them, and a test will refuse them: {why}."


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(MEASUREMENTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"a first impression, in minutes, into {QUICK}")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in MEASUREMENTS:
            raise launch.UsageError(f"there is no measurement {name!r}; there are {', '.join(MEASUREMENTS)}.")
    return arguments


def main():
    arguments = parse()
    names = [name for name in MEASUREMENTS if name in arguments.names or not arguments.names]
    for warning in warnings(arguments.quick):
        print(f"{warning}\n", flush=True)
    failed = take({name: command(name, arguments.quick) for name in names})
    measured = [name for name in names if name not in failed]
    if measured and not arguments.quick:
        failed += take(redrawing(measured))
    where = QUICK if arguments.quick else results.FOLDER.relative_to(results.ROOT)
    print(f"Measured: {', '.join(measured) or 'nothing'}. The numbers are in {where}.")
    if failed:
        print(f"Failed: {', '.join(failed)}. Its own words stand above; the other results are not affected.")
    return 1 if failed else 0
