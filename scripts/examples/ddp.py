"""Replicas under DDP.

torchrun --standalone --nproc-per-node 2 ddp.py
"""

import torch
import torch.distributed as dist
from task import STEPS, batches, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel

from distmuon import MuonW

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(make_model())
optimizer = MuonW(model, lr=1e-2, adamw_lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

for tokens, following in batches(rank, ranks):
    loss = loss_of(model, tokens, following)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

if rank == 0:
    torch.save(
        {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
        "checkpoint.pt",
    )
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
