"""Early stopping: validation at the end of each epoch, the best checkpoint kept, and tested when it is over."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotsafe


def main(url, trace):
    torch.manual_seed(0)
    x = torch.randn(72, 6)
    y = (x[:, :1] * x[:, 1:2]).tanh() + 0.3 * torch.randn(72, 1)
    ids = torch.arange(72)
    train_set, val_set = TensorDataset(ids[:40], x[:40], y[:40]), TensorDataset(x[40:], y[40:])

    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    train_loader = spotsafe.ResumableDataLoader(train_set, batch_size=16, shuffle=True, seed=5)
    val_loader = DataLoader(val_set, batch_size=8)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    keep = spotsafe.latest(2) | spotsafe.best("val_loss", mode="min")
    with spotsafe.session(url, **state, save_every=2, keep=keep, watch=None) as run:
        best = run.values.setdefault("best", {"val_loss": float("inf"), "epoch": -1})
        history = run.values.setdefault("history", [])
        for epoch in run.epochs(30):
            model.train()
            for step, (sample, inputs, targets) in run.steps(train_loader):
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                trace("train", f"{epoch}.{step}", loss, sample)

            model.eval()
            val_loss = 0.0
            with torch.no_grad():
                for number, (inputs, targets) in enumerate(run.interruptible(val_loader)):
                    noisy = inputs + 0.01 * torch.randn_like(inputs)
                    val_loss += nn.functional.mse_loss(model(noisy), targets).item() / len(val_loader)
                    trace("evaluate", f"{epoch}.{number}", val_loss)
            scheduler.step(val_loss)
            history.append(val_loss)
            trace("validation", epoch, val_loss)
            run.save(metrics={"val_loss": val_loss})
            if val_loss < best["val_loss"]:
                best.update(val_loss=val_loss, epoch=epoch)
            elif epoch - best["epoch"] >= 4:
                run.stop("no improvement")

    winner = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)).eval()
    with spotsafe.session(f"{url}-test", init_from=f"{url}@best", model=winner, watch=None):
        trace("test", 0, nn.functional.mse_loss(winner(x[40:]), y[40:]))
    return {**state, "values": run.values, "winner": winner}
