"""The body of the benchmark of a small cluster: an ordinary loop that trains a task until somebody stops it.

The same body runs under `paceline train`, in virtual time, and, with another pace, under
whatever else is compared. In real time the lead never evaluates: it keeps copies of the weights for somebody
else to measure, at the same counts of samples under every protocol, so that measuring takes nobody's time.
In virtual time measuring takes none, so the lead does it, and ends the run when it has seen enough.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline
from paceline_bench.cluster.tasks import TASKS

EPOCHS = 10_000
"""More than anybody waits for."""
SMOOTHED = 3
"""Accuracy is the mean of so many copies, one after the other: a single one is up or down two points."""

Look = Callable[[nn.Module], dict[str, float]]


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What all are told, word for word the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--copies", type=Path, help="Keep copies here; without it, measure.")
    parser.add_argument("--tests", type=int, required=True)
    parser.add_argument("--target", type=float, default=math.inf)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args(words)


def train(pace: Any, told: argparse.Namespace) -> None:
    """The body: an ordinary loop."""
    torch.set_num_threads(1)
    if told.copies is not None:
        pid_of(told.copies, pace.rank).write_text(str(os.getpid()))
    task = TASKS[told.task]
    model = task.model(told.seed)
    optimizer = task.optimizer(model, told.lr)
    round_ = told.batch * pace.size
    loader = DataLoader(task.training(told.data), batch_size=told.batch, shuffle=True, drop_last=True)
    rounds = told.epochs * len(loader) / pace.size
    scheduler = LambdaLR(optimizer, lambda done: warmed(done, round_, told.warmup) * decayed(done, rounds))
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    look = measurer(told) if told.copies is None else keeper(told.copies)
    backward = getattr(pace, "backward", Tensor.backward)  # rivals that have their own way
    due, seen = told.every, deque[float](maxlen=SMOOTHED)
    due = due if told.copies is not None else min(due, told.limit or due)
    for _ in pace.epochs(told.epochs or EPOCHS):
        for batch in loader:
            backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            samples = scheduler.last_epoch * round_
            if samples >= due and not told.epochs:
                seen.append((pace.evaluate(look) or {}).get("accuracy", -math.inf))
                due = samples - samples % told.every + told.every
                if pace.rank == 0 and told.copies is None and _is_over(told, seen, samples):
                    pace.stop("seen enough")


def warmed(rounds: int, round_: int, warmup: int) -> float:
    """The share of the learning rate, which rises over so many samples."""
    return min(1.0, (rounds + 1) * round_ / warmup)


def decayed(done: int, rounds: float) -> float:
    """The share that is left of the learning rate, along half a cosine; all of it if there is no end."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done / rounds))) if rounds else 1.0


def _is_over(told: argparse.Namespace, seen: deque[float], samples: int) -> bool:
    return samples >= told.limit or (len(seen) == SMOOTHED and fmean(seen) >= told.target)


def measurer(told: argparse.Namespace) -> Look:
    """Measures a model at once."""
    measure = TASKS[told.task].measure(told.data, told.tests)
    return lambda model: {"accuracy": measure(model)}


def keeper(folder: Path) -> Look:
    """Keeps copies of a model, numbered; what is there under its name is complete."""
    number = 0

    def keep(model: nn.Module) -> dict[str, float]:
        nonlocal number
        number += 1
        unfinished = folder / "unfinished"
        save_file({name: value.clone() for name, value in model.state_dict().items()}, unfinished)
        unfinished.rename(copy_of(folder, number))
        return {"copy": number}

    return keep


def pid_of(folder: Path, rank: int) -> Path:
    """Where a worker says which process it is, for somebody who wants to kill it."""
    return folder / f"{rank}.pid"


def copy_of(folder: Path, number: int) -> Path:
    """Where the copy with this number is."""
    return folder / f"{number}.safetensors"


if __name__ == "__main__":
    train(paceline.join(), options())
