"""Accelerate: one process, DDP or FSDP2.

accelerate launch accelerate_loop.py  (with --use_fsdp --fsdp_version 2 for FSDP2)
"""

import torch
from accelerate import Accelerator
from task import STEPS, batches, loss_of, make_model

from distmuon import MuonW

accelerator = Accelerator()
rank, ranks = accelerator.process_index, accelerator.num_processes
model = accelerator.prepare(
    make_model()
)  # first, so that MuonW sees what FSDP2 or DDP has made of it
optimizer = MuonW(model, lr=1e-2, adamw_lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
    optimizer, T_max=STEPS * ranks
)  # Accelerate steps it for all
optimizer, schedule = accelerator.prepare(optimizer, schedule)

for tokens, following in batches(rank, ranks):
    loss = loss_of(model, tokens, following)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

accelerator.save_state("out/accelerate")
accelerator.wait_for_everyone()
accelerator.load_state("out/accelerate")  # goes on exactly where it was
accelerator.print(f"loss {loss.item():.4f}")
