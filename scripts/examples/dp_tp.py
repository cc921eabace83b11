"""Data and tensor parallelism by hand, as in Megatron-LM.

torchrun --standalone --nproc-per-node 4 dp_tp.py
"""

import torch
import torch.distributed as dist
from task import DEVICE, STEPS, batches, loss_of, make_model
from torch.distributed.device_mesh import init_device_mesh

from distmuon import DistributedMuon, Grid, checkpoint, split_parameters

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(DEVICE, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
grid = Grid.of(mesh)

model = make_model(grid.tp)  # layers that hold this rank's part of each matrix
groups = split_parameters(model)
optimizer = DistributedMuon(groups, grid, lr=1e-2, adamw_lr=3e-3, max_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

for tokens, following in batches(mesh["dp"].get_local_rank(), ranks // 2):
    loss = loss_of(model, tokens, following)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

checkpoint.save("checkpoint", model, optimizer)  # loads on any grid
if rank == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
