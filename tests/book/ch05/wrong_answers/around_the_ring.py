# expect: every rank: it asked torch.distributed for allreduce_; only ring.pass_on is allowed here
import torch.distributed as dist


def all_reduce(ring, x):
    dist.all_reduce(x)
    return x
