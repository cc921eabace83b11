# expect: over budget: with the matrix at 18:33, rank 0 sent 156 bytes


def fetch(group, shard, start, end):
    return group.all_gather(shard, "bucket")[start:end]
