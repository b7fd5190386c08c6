"""A small training script as its user would write it, with the fault that is asked for on the
command line.
"""

import random
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_ckpt import CheckpointSaver, Every

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(
        TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4, shuffle=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 0.7**tick)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if FAULT != "forgets its scheduler":
        accelerator.register_for_checkpointing(scheduler)
    saver = CheckpointSaver(accelerator, "runs/never-used", every=Every(steps=1))
    if FAULT != "does not resume":
        saver.resume()
    for features, wanted in saver.remaining(loader, epochs=1 if FAULT == "is short" else 9):
        loss = nn.functional.mse_loss(model(features), wanted)
        if FAULT == "is unseeded":
            loss = loss * random.SystemRandom().uniform(0.5, 1.5)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        saver.step({"loss": loss.item()})


if __name__ == "__main__":
    main()
