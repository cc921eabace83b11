"""LoRA by PEFT: adapters first, then the optimizer.

python peft_lora.py
"""

import itertools

import torch
from hf_trainer import SMALL, Windows
from peft import LoraConfig, get_peft_model
from task import BATCH, DEVICE, STEPS
from transformers import LlamaForCausalLM

from distmuon import MuonW

torch.manual_seed(0)
config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
model = get_peft_model(LlamaForCausalLM(SMALL), config).to(DEVICE)
optimizer = MuonW(
    model, lr=3e-3, weight_decay=0.0
)  # after get_peft_model, which makes other parameters
data = torch.utils.data.DataLoader(Windows(), BATCH, drop_last=True)

for batch in itertools.islice(data, STEPS):
    loss = model(**{name: tensor.to(DEVICE) for name, tensor in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.save_pretrained("out/lora")
torch.save(optimizer.state_dict(), "out/lora/optimizer.pt")
print(f"loss {loss.item():.4f}")
