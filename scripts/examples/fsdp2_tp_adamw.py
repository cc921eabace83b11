"""FSDP2 over tensor parallelism.

torchrun --standalone --nproc-per-node 4 fsdp2_tp_adamw.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import DEVICE, STEPS, batches, loss_of, make_model
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

CUTS = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel) | dict.fromkeys(
    ("out", "down"), RowwiseParallel
)

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(DEVICE, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))

model = make_model()
for block in model.blocks:
    parallelize_module(block, mesh["tp"], {name: cut() for name, cut in CUTS.items()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-3, weight_decay=0.1, foreach=False
)  # two meshes
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

for tokens, following in batches(mesh["dp"].get_local_rank(), ranks // 2):
    loss = loss_of(model, tokens, following)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
if rank == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
