"""Wrong answers to the puzzle of chapter 12: above each stands what its reader must be told."""

import math

from muonbook.measure import profiler

SIZES = {"double": 8, "float": 4, "c10::BFloat16": 2}


# expect: step 1, rank 0:
# Right but for the dtype: momentum travels in bf16, and the norms of the gradients in float64.
def all_float32(events):
    sizes = dict.fromkeys(profiler.ITEM_BYTES, 4)
    saved, profiler.ITEM_BYTES = profiler.ITEM_BYTES, sizes
    try:
        return profiler.count_once(events)
    finally:
        profiler.ITEM_BYTES = saved


def annotated(events, times):
    """Return kind -> bytes of the inputs that the annotations know, so many times."""
    found = {}
    for event in events:
        if event.get("name", "").startswith("gloo:"):
            kind = event["name"].removeprefix("gloo:")
            size = SIZES[event["args"]["Input type"][0]] * math.prod(event["args"]["Input Dims"][0])
            found[kind] = found.get(kind, 0) + size * times.get(kind, 1)
    return found


# expect: 72 bytes of all_gather, where 168 were called for
# The annotation knows a gather's input, which is one rank's shard, and not what was gathered.
def annotations_alone(events):
    return annotated(events, {})


# expect: 144 bytes of all_gather, where 168 were called for
# Two ranks, so twice the shard? Momentum is gathered over four.
def annotations_doubled(events):
    return annotated(events, {"all_gather": 2})


# expect: 240 bytes of all_gather, where 168 were called for
# Every event whose name sounds right: the operator and the annotation both.
def matches_names(events):
    found = {}
    for event in events:
        name = event.get("name", "")
        for kind in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
            if kind in name or kind.replace("_", "") in name:
                dims, size = event["args"]["Input Dims"][0], SIZES.get(event["args"]["Input type"][0], 8)
                dims = dims[0] if dims and isinstance(dims[0], list) else dims
                found[kind] = found.get(kind, 0) + size * math.prod(dims)
    return found
