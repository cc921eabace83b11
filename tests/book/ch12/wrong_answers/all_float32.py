# expect: step 1, rank 0:
# Right but for the dtype: momentum travels in bf16, and the norms of the gradients in float64.
from muonbook.measure import profiler


def count_once(events):
    sizes = dict.fromkeys(profiler.ITEM_BYTES, 4)
    saved, profiler.ITEM_BYTES = profiler.ITEM_BYTES, sizes
    try:
        return profiler.count_once(events)
    finally:
        profiler.ITEM_BYTES = saved
