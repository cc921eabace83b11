"""Chapter 11: run distributed Muon with one thing broken, and see which alarms go off, and which do not.

python scripts/11_bug_museum.py --exhibit "block-wise Newton–Schulz"
python scripts/11_bug_museum.py
"""

from distmuon import launch
from muonbook.ch11 import puzzle as update_alarm
from muonbook.puzzles import add_arguments, handle

RIGHT = "right, to the last bit"
CLOSE = 0.05  # of the movement: rounding in bf16 moves a correct result less


def exhibit_name(wanted, names):
    """Return the exhibit that is meant: letters decide, not case, hyphens or the dash in Newton–Schulz."""

    def letters(name):
        return "".join(letter for letter in name.lower() if letter.isalnum())

    for name in names:
        if letters(name) == letters(wanted):
            return name
    raise launch.UsageError(f"--exhibit {wanted!r} is not in the museum; choose one of {', '.join(names)}.")


def verdict(visit, scenario):
    """Return what one rank sees of the result: "right", or which matrices are wrong and how."""
    from muonbook.ch11.museum_tour import moved

    if visit.error:
        return f"stops: {visit.error.splitlines()[0]}"
    if any(bool(matrix.isnan().any()) for matrix in visit.parameters.values()):
        return "NaN in " + ", ".join(name for name, m in visit.parameters.items() if m.isnan().any())
    far = moved(visit.parameters, scenario)
    kinds = {
        "WRONG": [name for name, distance in far.items() if distance > CLOSE],
        "rounded differently": [name for name, distance in far.items() if 0 < distance <= CLOSE],
    }
    found = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    return "; ".join(found) or RIGHT


def alarms(name, ranks):
    """Return which alarms go off in which scenarios: {alarm: [scenario, ...]}."""
    from muonbook.ch11.museum_tour import SCENARIOS

    heard: dict[str, list[str]] = {"stops": [], "result": [], "bytes": [], "replicas": []}
    for label, scenario in SCENARIOS.items():
        visits = [rank[name, label] for rank in ranks]
        if any(visit.error for visit in visits):
            heard["stops"].append(label)
            continue
        if any(verdict(visit, scenario) != RIGHT for visit in visits):
            heard["result"].append(label)
        if any(visit.bytes for visit in visits):
            heard["bytes"].append(label)
        first = visits[0].parameters
        if any(
            not first[key].equal(visit.parameters[key])
            for visit in visits
            for key in first
            if not first[key].isnan().any()
        ):
            heard["replicas"].append(label)
    return heard


def label_of(name, ranks):
    """Return what one exhibit does in every scenario, line by line."""
    from muonbook.ch11.museum_tour import DP, SCENARIOS, TP

    heard = alarms(name, ranks)
    lines = [f"{name or 'healthy'}, on {DP} DP x {TP} TP ranks, beside one process:"]
    outcomes: dict[str, list[str]] = {}
    for label, scenario in SCENARIOS.items():
        counted = "" if label in heard["stops"] else f"; bytes {'WRONG' if label in heard['bytes'] else 'as predicted'}"
        outcomes.setdefault(verdict(ranks[0][name, label], scenario) + counted, []).append(label)
    for outcome, labels in sorted(outcomes.items(), key=lambda item: len(item[1])):
        where = "all scenarios" if len(outcomes) == 1 else "the others" if len(labels) > 2 else ", ".join(labels)
        lines.append(f"  {where:18s} {outcome}")
    if heard["bytes"]:
        different = [line for rank in ranks for line in rank[name, heard["bytes"][0]].bytes]
        row = different[0].partition(":")[0]
        lines.append(f"  ledger differs     {row}, among others")
    if not heard["stops"]:
        lines.append(f"  replicas           {'RANKS DIFFER' if heard['replicas'] else 'all ranks agree'}")
    return lines


def show_table(names, ranks):
    """Print which alarm hears which exhibit: in all scenarios, in some (how many), or in none."""
    from muonbook.ch11.museum_tour import SCENARIOS

    print(f"{'scenarios, of ' + str(len(SCENARIOS)):30s}  stops  result  bytes  replicas")
    for name in names:
        heard = [len(labels) or "." for labels in alarms(name, ranks).values()]
        print(f"{name or 'healthy':30s}  {heard[0]!s:>5s}  {heard[1]!s:>6s}  {heard[2]!s:>5s}  {heard[3]!s:>8s}")


def show_lonely(name):
    """Show the one exhibit that can end a rank: it gets a world of its own."""
    from muonbook.ch11.museum_tour import DP, TP, visit_lonely

    try:
        launch.run(visit_lonely, (name,), dp=DP, tp=TP, timeout=5)
        print("  a rank without a piece: nothing happened")
    except launch.WorldError as error:
        who = "a rank" if error.rank is None else f"DP rank {error.rank // TP}"
        where = "dp_gather" if " in dp_gather" in str(error) else "another collective"
        print(f"  a rank without a piece: the world ended; {who} was in {where}")


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument(
        "--exhibit", metavar="NAME", help="which one to run; without it, all, and which alarm hears which"
    )
    parser.add_argument("--json", metavar="FILE", help="write what every exhibit shows here")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="per collective")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    launch.check_writable("--json", arguments.json)
    if (code := handle(arguments, update_alarm.PUZZLE)) is not None:
        return code
    from muonbook import report
    from muonbook.ch11.museum import EXHIBITS
    from muonbook.ch11.museum_tour import DP, TP, visit

    tour = arguments.exhibit is None
    names = [None, *EXHIBITS]
    if not tour:
        chosen = exhibit_name(arguments.exhibit, ["healthy", *EXHIBITS])
        names = [None if chosen == "healthy" else chosen]
    ranks = launch.run(visit, (names,), dp=DP, tp=TP, timeout=arguments.timeout)
    if not launch.speaks():
        return 0  # under torchrun, rank 0 alone goes on
    if arguments.json:
        report.write_json(arguments.json, {name or "healthy": label_of(name, ranks) for name in names})
    if tour:
        show_table(names, ranks)
        return 0
    print("\n".join(label_of(names[0], ranks)))
    if chosen == "empty shard":
        show_lonely(chosen)
    return 0


if __name__ == "__main__":
    launch.command(main)
