"""One GPU, or one CPU.

python one_device.py
"""

import torch
from task import STEPS, batches, loss_of, make_model

from distmuon import MuonW

model = make_model()
optimizer = MuonW(model, lr=1e-2, adamw_lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

for tokens, following in batches():
    loss = loss_of(model, tokens, following)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    "checkpoint.pt",
)
print(f"loss {loss.item():.4f}")
