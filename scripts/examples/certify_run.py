"""Is the sharded run the single-process run? Your model, data and optimizers go here.

torchrun --standalone --nproc-per-node 2 certify_run.py
"""

import torch
import torch.distributed as dist
from task import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distmuon import DistributedMuon, MuonW, certify, split_parameters

dist.init_process_group()
ranks = dist.get_world_size()
mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("dp",))
tokens = torch.randint(64, (10, 4 * ranks, 16), generator=torch.Generator())
batches = [(batch, (3 * batch + 1) % 64) for batch in tokens]  # inputs, targets


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.block = nn.TransformerEncoderLayer(
            *(32, 4, 64, 0.0, "gelu"), batch_first=True, norm_first=True, bias=False
        )
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        return self.head(self.block(self.tokens(tokens)))


def zero1(model, grid, gather_dtype=None):
    groups = split_parameters(model)
    return DistributedMuon(groups, grid, lr=1e-2, gather_dtype=gather_dtype)


def fsdp2(model, grid, gather_dtype=None):
    fully_shard(model.block, mesh=grid.mesh)
    fully_shard(model, mesh=grid.mesh)
    return MuonW(model, lr=1e-2, gather_dtype=gather_dtype)


for make_optimizer in (zero1, fsdp2):
    certificate = certify(Transformer, batches, make_optimizer, mesh, micro_batches=2)
    if certificate is not None:  # on rank 0
        print(certificate)
dist.destroy_process_group()
