"""Time whole training steps for the claims page: Muon's against ZeRO-1 AdamW's with more and more tokens, on four DP
ranks of one machine, and AdamW with asynchronous all-reduces against itself without. Kept are ratios within a round.
"""

from distmuon import launch
from muonbook.ch15 import regimes
from muonbook.measure import interleaved_timing, results
from muonbook.measure.workload import TIMED

RANKS = 4  # DP, T = 1
SEQUENCES = (1, 4, 16)  # per rank and step, of 64 tokens
TIMED_TOO = ("muon", "muon_cut", "muon_owner")  # beside "zero1"
RACE = "tools.asynchronous_adamw:race"


def by_tokens(rounds, sequences=SEQUENCES):
    """Return, per tokens of a rank, {baseline: its step over ZeRO-1 AdamW's}."""
    baselines = {name: regimes.SKEW[name] for name in ("zero1", *TIMED_TOO)}
    rows = []
    for each in sequences:
        workload = TIMED.shared_by(RANKS, each)
        timed = launch.run(regimes.TIME_STEPS, (workload, baselines, rounds, False), dp=RANKS)
        ranks = [rank[RANKS, 1] for rank in timed]
        over = {name: regimes.ratios(ranks, name, "zero1") for name in TIMED_TOO}
        rows.append({"tokens_per_rank": workload.tokens // RANKS, **over})
    return rows


def asynchronous(rounds):
    """Return AdamW's step with all all-reduces started first over one that awaits each, elapsed, and the same ratio of
    the all-reduces' durations added up."""
    ranks = launch.run(RACE, (rounds,), dp=RANKS)

    def ratio(key):
        awaited, started = (
            [max(times) for times in zip(*(rank[key][way] for rank in ranks), strict=True)] for way in ranks[0][key]
        )
        return results.spread(interleaved_timing.ratios(started, awaited))

    equal = all(rank["equal_parameters"] for rank in ranks)
    return {"equal_parameters": equal, "elapsed": ratio("seconds"), "durations": ratio("durations")}


def world():
    """Return grid, dtype and model of the steps by tokens."""
    return {"dp": RANKS, "tp": 1, "dtype": TIMED.dtype, "width": TIMED.width, "layers": TIMED.layers}


def measure(quick):
    """Return everything that book/results/step_ratios.json holds. quick: few rounds, and one number of tokens."""
    rows = by_tokens(2, SEQUENCES[:1]) if quick else by_tokens(24)
    return {"world": world(), "by_tokens": rows, "asynchronous_adamw": asynchronous(4 if quick else 100)}
