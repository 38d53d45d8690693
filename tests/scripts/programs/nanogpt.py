"""Like nanoGPT: batches drawn from one long array, micro-steps by hand, a loss scaler, clipping, EMA, evaluation."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spotsafe


class GPT(nn.Module):
    def __init__(self, vocabulary=61, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(url, trace):
    torch.manual_seed(1337)
    data = (np.arange(4000, dtype=np.uint32) ** 2 % 61).astype(np.uint16)
    model = GPT()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)  # overflows at first

    def get_batch():
        at = torch.randint(len(data) - 9, (4,))
        cut = np.stack([data[i : i + 9] for i in at]).astype(np.int64)
        return at, torch.from_numpy(cut[:, :-1]), torch.from_numpy(cut[:, 1:])

    state = {"model": model, "ema": ema, "optimizer": optimizer, "scaler": scaler}
    keep = spotsafe.latest(2) | spotsafe.best("val_loss", mode="min")
    with spotsafe.session(url, **state, save_every=4, keep=keep, watch=None) as run:
        for step in run.range(24):
            if step % 6 == 0:
                model.eval()
                with torch.no_grad():
                    val_loss = sum(model(*get_batch()[1:]).item() for _ in run.interruptible(range(5))) / 5
                model.train()
                trace("validation", step, val_loss)
                run.save(metrics={"val_loss": val_loss})

            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min((step + 1) / 4, 0.55 + 0.45 * math.cos(math.pi * step / 24))
            for micro in range(3):
                at, tokens, targets = get_batch()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(tokens, targets) / 3
                scaler.scale(loss).backward()
                trace("micro", f"{step}.{micro}", loss, at)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            ema.update_parameters(model)
            trace("scale", step, scaler.get_scale())
    return state
