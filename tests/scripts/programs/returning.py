"""A reclaim ends the loops only: code behind them runs, looks at the notice, and leaves with a code of its own."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import spotsafe


def main(url, trace):
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    samples = TensorDataset(torch.arange(40), x, x.prod(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.02)
    loader = spotsafe.ResumableDataLoader(samples, batch_size=8, shuffle=True, seed=2)

    state = {"model": model, "optimizer": optimizer}
    with spotsafe.session(url, **state, save_every=4, on_reclaim="return", watch=None) as run:
        run.values.setdefault("log", [])
        for epoch in run.epochs(8):
            for step, (ids, inputs, targets) in run.steps(loader):
                loss = (model(inputs) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                trace("step", f"{epoch}.{step}", loss, ids)
            if run.notice is None:
                run.values["log"].append([epoch, torch.rand(()).item()])
        if run.notice is None:
            run.values["score"] = (model(x) - samples.tensors[2]).abs().mean().item()

    if "score" not in run.values:
        sys.exit(75)
    trace("score", 0, run.values["score"])
    return {**state, "values": run.values}
