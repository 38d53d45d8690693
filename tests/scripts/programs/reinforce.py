"""Policy gradients: episodes of any length in a loop of one's own, each a step by `run.safe_point()`."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

import spotsafe


def main(url, trace):
    torch.manual_seed(0)
    random.seed(0)
    weather = np.random.default_rng(3)
    world = {"wind": 0.0, "episodes": 0}
    policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    baseline = torch.zeros(1)

    state = {
        "policy": policy,
        "optimizer": optimizer,
        "baseline": baseline,
        "weather": weather,
        "world": (lambda: dict(world), world.update),
    }
    with spotsafe.session(url, **state, save_every=3, keep=2, watch=None) as run:
        returns = run.values.setdefault("returns", [])
        while run.step < 25:
            world["wind"] = 0.9 * world["wind"] + 0.1 * weather.normal()
            world["episodes"] += 1
            place, log_probs = random.uniform(-1, 1), []
            while abs(place) < 2 and len(log_probs) < 12:
                choice = torch.distributions.Categorical(
                    logits=policy(torch.tensor([place, world["wind"]], dtype=torch.float))
                )
                action = choice.sample()
                log_probs.append(choice.log_prob(action))
                place += 0.5 * (2 * action.item() - 1) + world["wind"] + np.random.normal(scale=0.1)
            reward = float(len(log_probs))
            baseline.mul_(0.9).add_(0.1 * reward)
            loss = -(reward - baseline.item()) * torch.stack(log_probs).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            returns.append(reward)
            trace("episode", run.step, loss, [world["episodes"], len(log_probs)])
            run.safe_point()
    return {**state, "values": run.values, "world": world}
