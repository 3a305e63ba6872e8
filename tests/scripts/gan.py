"""A tiny GAN with an averaged generator: two models that train, one that follows, two optimizers.

With --joint both losses go backward at once before either optimizer steps, as in actor-critic training.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

SAMPLES = 48


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()

    pace = paceline.join()
    torch.manual_seed(4)
    torch.set_default_dtype(torch.float64)
    g = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    d = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    ema = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    ema.load_state_dict(g.state_dict())
    opt_g = torch.optim.Adam(g.parameters(), lr=0.01, betas=(0.5, 0.999), eps=1e-3)
    opt_d = torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.5)
    sched_d = torch.optim.lr_scheduler.StepLR(opt_d, step_size=2, gamma=0.9)
    drawn = torch.Generator().manual_seed(0)
    real = torch.randn(SAMPLES, 2, generator=drawn) * 0.5 + torch.tensor([2.0, -1.0])
    noise = torch.randn(SAMPLES, 3, generator=drawn)
    loader = DataLoader(TensorDataset(real, noise), batch_size=args.batch)
    g, d, ema, opt_g, opt_d, sched_d, loader = pace.prepare(g, d, ema, opt_g, opt_d, sched_d, loader)
    loss = nn.functional.binary_cross_entropy_with_logits
    for _ in pace.epochs(args.epochs):
        for x, z in loader:
            ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            if args.joint:
                opt_d.zero_grad()
                opt_g.zero_grad()
                fake = g(z)
                (loss(d(x), ones) + loss(d(fake.detach()), zeros)).backward()
                (fake - x).square().mean().backward()
                opt_d.step()
                opt_g.step()
            else:
                d.zero_grad()
                loss(d(x), ones).backward()
                fake = g(z)
                loss(d(fake.detach()), zeros).backward()
                opt_d.step()
                g.zero_grad()
                loss(d(fake), ones).backward()
                opt_g.step()
            sched_d.step()
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), g.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            pace.report(loss=float(loss(d(x), ones)))
    pace.evaluate(lambda g, d, ema: {"apart": float((g(noise).mean(0) - real.mean(0)).norm())})
    state = opt_g.state_dict()["state"]
    assert len(state) == 4, state
    assert all(bool(each["exp_avg"].any()) for each in state.values())
    pace.leave()
    if args.save:
        save_file(nn.ModuleList([g, d, ema]).state_dict(), args.save.with_suffix(f".{pace.rank}"))


main()
