# expect: over budget: with a matrix of 4 x 24, rank 0 sent 288 bytes, and 96 are enough
# Right, and the whole matrix travels.
def gram(group, block):
    whole = group.all_gather_blocks(block, 1, "whole")
    return whole @ whole.T, whole.norm()
