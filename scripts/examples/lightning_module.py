"""Lightning. python lightning_module.py [ddp|model_parallel PROCESSES]"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from task import DEVICE, STEPS, batches, loss_of, make_model
from torch.distributed.fsdp import fully_shard

from distmuon import MuonW


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh)

    def training_step(self, batch):
        loss = loss_of(self.model, *batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        # None but under DDP, whose replicas share the work
        replicas = getattr(self.trainer.strategy.model, "process_group", None)
        rates = {"lr": 1e-2, "adamw_lr": 3e-3, "weight_decay": 0.1}
        optimizer = MuonW(self.model, **rates, replicas=replicas)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(self, optimizer, *_, **__):
        optimizer.clip_grad_norm_(1.0)

    def train_dataloader(self):
        data = list(batches(self.global_rank, self.trainer.world_size))
        return torch.utils.data.DataLoader(data, batch_size=None)


strategy, processes = sys.argv[1:] or ("auto", "1")
trainer = lightning.Trainer(
    accelerator="gpu" if DEVICE == "cuda" else "cpu",
    devices=int(processes),
    strategy=ModelParallelStrategy() if strategy == "model_parallel" else strategy,
    max_epochs=1,
    logger=False,
    enable_progress_bar=False,
    use_distributed_sampler=False,
)
trainer.fit(Training())
trainer.save_checkpoint("out/lightning/last.ckpt")
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss']:.4f}")
