"""Hugging Face's Trainer.

python hf_trainer.py, or torchrun --standalone --nproc-per-node 2 hf_trainer.py
"""

import sys

import torch.distributed as dist
from task import BATCH, CONTEXT, DEVICE, STEPS
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from distmuon import MuonW
from distmuon.models.corpus import corpus

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = LlamaConfig(vocab_size=corpus("alice").vocabulary, **SIZES, **HEADS)


class Windows(Dataset):
    """Windows of Alice in Wonderland, one after the other."""

    def __len__(self):
        return len(corpus("alice").training) // CONTEXT

    def __getitem__(self, number):
        window = corpus("alice").training[number * CONTEXT :][:CONTEXT].long()
        return {"input_ids": window, "labels": window}


class MuonTrainer(Trainer):
    def create_optimizer(self, model=None):
        """Make MuonW of the model itself, and let DDP's replicas share the work."""
        if self.optimizer is None:
            replicas = dist.group.WORLD if dist.is_initialized() else None
            rate = self.args.learning_rate
            rates = {"lr": 3 * rate, "adamw_lr": rate}
            rates["weight_decay"] = self.args.weight_decay
            self.optimizer = MuonW(self.model, **rates, replicas=replicas)
        return self.optimizer


if __name__ == "__main__":
    arguments = TrainingArguments(
        "out/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        weight_decay=0.1,
        save_steps=STEPS // 2,
        report_to=[],
        use_cpu=DEVICE == "cpu",  # or it does not join the processes of torchrun
    )
    trainer = MuonTrainer(LlamaForCausalLM(SMALL), arguments, train_dataset=Windows())
    loss = trainer.train(resume_from_checkpoint="--resume" in sys.argv).training_loss
    if trainer.is_world_process_zero():
        print(f"loss {loss:.4f}")
