"""Gradients accumulated by hand: an update at every fourth step only, the loop knows nothing of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import spotsafe


def main(url, trace):
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    samples = TensorDataset(torch.arange(48), x, x.abs().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    loader = spotsafe.ResumableDataLoader(samples, batch_size=7, shuffle=True, seed=8)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with spotsafe.session(url, **state, save_every=3, keep=2, watch=None) as run:
        run.values.setdefault("samples", 0)
        for step, (ids, inputs, targets) in run.steps(loader, until=48):
            loss = (model(inputs) - targets).square().mean() / 4
            loss.backward()
            run.values["samples"] += len(ids)
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            trace("step", step, loss, ids)
    return {**state, "values": run.values}
