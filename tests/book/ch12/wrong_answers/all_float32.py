# expect: step 1, rank 0:
# Right but for the dtype: momentum travels in bf16, and the norms of the gradients in float64.
from muonbook.measure import profiled


def count_once(events):
    sizes = dict.fromkeys(profiled.ITEM_BYTES, 4)
    saved, profiled.ITEM_BYTES = profiled.ITEM_BYTES, sizes
    try:
        return profiled.count_once(events)
    finally:
        profiled.ITEM_BYTES = saved
