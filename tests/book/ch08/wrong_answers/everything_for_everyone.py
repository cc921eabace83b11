# expect: in case 1, rank 0 returned matrix 2, of which it owns nothing: work for others
def gather_cut(group, shard, matrices):
    bucket = group.all_gather(shard, "bucket")
    return {i: bucket[place.as_slice] for i, place in enumerate(matrices)}
