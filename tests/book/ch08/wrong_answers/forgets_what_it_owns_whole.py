# expect: in case 1, rank 0 owns a piece of matrix 0 and did not return it
# Only what travelled is returned: a matrix that was whole from the start is missing.
from muonbook.ch08.puzzle import cut_pieces
from muonbook.ch08.puzzle import gather_cut as right


def gather_cut(group, shard, matrices):
    cut = {index for index, _ in cut_pieces(matrices, group.rank, len(shard))}
    return {index: matrix for index, matrix in right(group, shard, matrices).items() if index in cut}
