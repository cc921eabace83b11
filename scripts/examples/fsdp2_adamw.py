"""FSDP2, saved by torch.distributed.checkpoint.

torchrun --standalone --nproc-per-node 2 fsdp2_adamw.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import DEVICE, STEPS, batches, loss_of, make_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("dp",))

model = make_model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

if os.path.isdir("checkpoint"):
    weights, state = get_state_dict(
        model, optimizer
    )  # makes a state by a step of its own, so only to load one
    saved = {
        "model": weights,
        "optimizer": state,
        "schedule": schedule.state_dict(),
    }
    dcp.load(saved, checkpoint_id="checkpoint")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    schedule.load_state_dict(saved["schedule"])

for tokens, following in batches(rank, ranks, first=schedule.last_epoch):
    loss = loss_of(model, tokens, following)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

weights, state = get_state_dict(model, optimizer)
saved = {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}
dcp.save(saved, checkpoint_id="checkpoint")
if rank == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
