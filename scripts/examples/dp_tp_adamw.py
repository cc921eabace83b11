"""Data and tensor parallelism by hand, as in Megatron-LM.

torchrun --standalone --nproc-per-node 4 dp_tp_adamw.py
"""

import torch
import torch.distributed as dist
from task import DEVICE, STEPS, batches, loss_of, make_model
from torch.distributed.device_mesh import init_device_mesh

from distmuon import Grid

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(DEVICE, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
grid = Grid.of(mesh)

model = make_model(grid.tp)  # layers that hold this rank's part of each matrix
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

for tokens, following in batches(mesh["dp"].get_local_rank(), ranks // 2):
    loss = loss_of(model, tokens, following)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh["dp"].get_group())
        p.grad /= ranks // 2
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

torch.save(model.state_dict(), f"checkpoint-{rank}.pt")
if rank == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
