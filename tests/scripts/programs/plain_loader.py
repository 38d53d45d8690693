"""A plain DataLoader, shuffled and augmented by the global generators: a resume skips what was used."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotsafe


class Augmented(Dataset):
    def __len__(self):
        return 34

    def __getitem__(self, index):
        x = (
            torch.full((5,), index / 34)
            + 0.1 * torch.randn(5)
            + 0.1 * random.random()
            + 0.1 * np.random.rand()
        )
        return index, x


def main(url, trace):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40)
    loader = DataLoader(Augmented(), batch_size=5, shuffle=True)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with spotsafe.session(url, **state, save_every=3, keep=2, watch=None) as run:
        for step, (ids, x) in run.steps(loader, until=38, resume_data="skip"):
            loss = (model(x).squeeze(1) - ids / 34).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            trace("step", step, loss, ids)
    return state
