# expect: your slowest rank works
def deal(costs, ranks):
    return {matrix: matrix % ranks for matrix in costs}
