"""Two stages with a loader each: the second freezes the body and trains a new head, all made when it begins."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import spotsafe


def main(url, trace):
    torch.manual_seed(0)
    ids, x = torch.arange(60), torch.randn(60, 8)
    body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2))
    decoder = nn.Linear(12, 8)
    pretrainer = torch.optim.AdamW([*body.parameters(), *decoder.parameters()], lr=0.01)
    unlabelled = spotsafe.ResumableDataLoader(TensorDataset(ids, x), batch_size=8, shuffle=True, seed=1)
    labelled = spotsafe.ResumableDataLoader(
        TensorDataset(ids[:20], x[:20], x[:20].sum(1, keepdim=True)), batch_size=6, shuffle=True, seed=2
    )

    state = {"body": body, "decoder": decoder, "pretrainer": pretrainer}
    with spotsafe.session(url, **state, save_every=3, keep=2, watch=None) as run:
        for step, (sample, inputs) in run.steps(unlabelled, epochs=2):
            loss = (decoder(body(inputs)) - inputs).square().mean()
            pretrainer.zero_grad()
            loss.backward()
            pretrainer.step()
            trace("pretrain", step, loss, sample)

        body.requires_grad_(False)
        head = nn.Linear(12, 1)  # draws its first weights here, between the stages
        finetuner = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(finetuner, 18)
        late = {"head": head, "finetuner": finetuner, "scheduler": scheduler}
        run.track(**late)

        for step, (sample, inputs, targets) in run.steps(labelled, until=18):
            loss = (head(body(inputs)) - targets).square().mean()
            finetuner.zero_grad()
            loss.backward()
            finetuner.step()
            scheduler.step()
            trace("finetune", step, loss, sample)
    return {**state, **late}
