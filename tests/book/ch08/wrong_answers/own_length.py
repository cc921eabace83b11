# expect: unequal pieces: ranks 0 to 3 hand over 8, 14, 5 and 0 elements, and an all-gather wants as many from each.
# Pieces are sent as long as they are, and an all-gather wants them equally long.
import torch

from muonbook.ch08.puzzle import cut_pieces


def gather_cut(group, shard, matrices):
    size, origin = len(shard), group.rank * len(shard)
    lists = [cut_pieces(matrices, rank, size) for rank in range(group.size)]
    if not any(lists):
        return {}
    own = [shard[piece.relative_to(origin).as_slice] for _, piece in lists[group.rank]]
    message = torch.cat([*own, shard.new_zeros(0)])
    group.all_gather(message, "cut pieces")
    return {}
