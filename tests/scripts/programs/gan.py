"""A GAN: two networks with an optimizer and a scheduler each, the generator updated at every second step.

The critic's spectral norm and the generator's batch norm write buffers in the forward pass.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

import spotsafe


def main(url, trace):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(
        spectral_norm(nn.Linear(2, 16)), nn.LeakyReLU(0.2), nn.Dropout(0.2), spectral_norm(nn.Linear(16, 1))
    )
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    sched_g = torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.97)
    sched_c = torch.optim.lr_scheduler.StepLR(opt_c, 5, 0.8)
    state = {
        "generator": generator,
        "critic": critic,
        "opt_g": opt_g,
        "opt_c": opt_c,
        "sched_g": sched_g,
        "sched_c": sched_c,
    }

    angle = torch.linspace(0, 6.28, 70)
    circle = TensorDataset(torch.arange(70), torch.stack([angle.cos(), angle.sin()], dim=1))
    loader = spotsafe.ResumableDataLoader(circle, batch_size=8, shuffle=True, drop_last=True, seed=1)

    with spotsafe.session(url, **state, save_every=4, keep=2, watch=None) as run:
        for step, (ids, real) in run.steps(loader, until=40):
            fake = generator(torch.randn(len(real), 4))
            loss_c = (1 - critic(real)).relu().mean() + (1 + critic(fake.detach())).relu().mean()
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            sched_c.step()
            trace("critic", step, loss_c, ids)

            if step % 2 == 1:
                loss_g = -critic(generator(torch.randn(len(real), 4))).mean()
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()
                sched_g.step()
                trace("generator", step, loss_g)
    return state
