"""Q-learning: the environment's state is a (get, set) pair, the replay buffer tensors, each generator tracked."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import spotsafe


class Walk:
    """A walk on a line that ends at either side."""

    def __init__(self):
        self.position, self.age = 5, 0

    def act(self, action, slip):
        self.position += (2 * action - 1) * (-1 if slip else 1)
        self.age += 1
        done = self.position in (0, 10) or self.age >= 25
        return float(self.position == 10), done


def main(url, trace):
    torch.manual_seed(0)
    env, noise, explore = Walk(), np.random.default_rng(1), torch.Generator().manual_seed(2)
    q, target = nn.Linear(11, 2), nn.Linear(11, 2)
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.SGD(q.parameters(), lr=0.2, momentum=0.9)
    replay = {"seen": torch.zeros(64, 4), "count": torch.zeros((), dtype=torch.long)}
    one_hot = torch.eye(11)

    state = {
        "q": q,
        "target": target,
        "optimizer": optimizer,
        "replay": replay,
        "noise": noise,
        "explore": explore,
        "env": (lambda: vars(env).copy(), lambda saved: vars(env).update(saved)),
    }
    with spotsafe.session(url, **state, save_every=5, keep=3, watch=None) as run:
        episodes = run.values.setdefault("episodes", [])
        for step in run.range(60):
            before = env.position
            if torch.rand((), generator=explore) < 0.3:
                action = int(torch.randint(2, (), generator=explore))
            else:
                action = int(q(one_hot[before]).argmax())
            reward, done = env.act(action, slip=noise.random() < 0.1)
            row = int(replay["count"]) % 64
            replay["seen"][row] = torch.tensor([before, action, reward, env.position], dtype=torch.float)
            replay["count"] += 1
            if done:
                episodes.append((step, env.age, reward))
                env.__init__()

            chosen = torch.randint(min(64, int(replay["count"])), (8,))
            batch = replay["seen"][chosen]
            value = q(one_hot[batch[:, 0].long()]).gather(1, batch[:, 1:2].long()).squeeze(1)
            with torch.no_grad():
                goal = batch[:, 2] + 0.9 * target(one_hot[batch[:, 3].long()]).max(1).values
            loss = (value - goal).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace("step", step, loss, chosen)
            if step % 7 == 6:
                target.load_state_dict(q.state_dict())
    return {**state, "values": run.values, "env": vars(env)}
