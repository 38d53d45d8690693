"""Train a small GPT on the source code of the Python standard library.

`train_gpt_plain.py` is a plain training loop. `train_gpt.py` is the same with spotsafe: four lines differ.
Kill that one however you like and run the same command again: it ends as if nothing had happened.

    python train_gpt.py --url runs/gpt --steps 1000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import spotsafe
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils import data

CONTEXT = 128  # bytes that the model sees at once


class Text(data.Dataset[tuple[Tensor, Tensor, int]]):
    """The text, cut into windows. An item: bytes, the same one byte later (what to predict), its number."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.digest = hashlib.sha256(text).hexdigest()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        window = self.text[number * CONTEXT : (number + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:], number


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each after a norm and with a way around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return seen.transpose(1, 2).reshape(batch, length, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.dropout(self.project(self.attend(self.norm_1(x))), self.dropout, self.training)
        return x + functional.dropout(self.perceptron(self.norm_2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts each next byte from those before it."""

    def __init__(self, layers: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 32), dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks(self.bytes(x) + self.places.weight)
        return functional.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), y.flatten())


def report(step: int, loss: float, numbers: list[int], trace: str) -> None:
    """Print a line now and then; write one for every step, exact to the last bit."""
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}", flush=True)
    with open(trace, "a") as file:
        line = {"step": step, "loss": loss.hex(), "ids": numbers, "time": time.time()}
        file.write(json.dumps(line) + "\n")


def train(
    *,
    url: str,
    steps: int,
    save_every: int,
    batch_size: int,
    layers: int,
    width: int,
    seed: int,
    workers: int,
    trace: str,
) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in another order
    torch.use_deterministic_algorithms(True)
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    text = Text()
    print(f"sha256 of the text {text.digest[:16]}, {torch.get_num_threads()} threads", flush=True)
    model = GPT(layers, width).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warm_up, cosine = LinearLR(opt, 0.05, total_iters=20), CosineAnnealingLR(opt, max(1, steps - 20))
    sched = SequentialLR(opt, [warm_up, cosine], milestones=[20])
    loader = spotsafe.ResumableDataLoader(text, batch_size=batch_size, shuffle=True, num_workers=workers)

    with spotsafe.session(url, model=model, optimizer=opt, scheduler=sched, save_every=save_every) as run:
        for step, batch in run.steps(loader, until=steps):
            x, y, numbers = batch
            loss = model(x.to(device), y.to(device))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            report(step, loss.item(), numbers.tolist(), trace)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    parser.add_argument("--url", default="runs/gpt", help="where checkpoints go: a folder or any fsspec URL")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of dropout")
    parser.add_argument("--workers", type=int, default=1, help="processes that load data")
    parser.add_argument("--trace", default=os.devnull, help="a file that gets one line of JSON for each step")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
