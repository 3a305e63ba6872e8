"""A tiny training whose model is also wrapped in what exchanges gradients itself, in the way --how says."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["before", "within", "after", "sharded"])
parser.add_argument("--port", help="where ranks meet, unless their starter says")
how, port = (asked := parser.parse_args()).how, asked.port


def connect() -> None:
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if not dist.is_initialized():  # a run over gloo has a group
        dist.init_process_group("gloo")


torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model: Any = torch.nn.Sequential(torch.nn.Linear(4, 1))
wrapped: Any = None
pace = paceline.join()
if how in ("before", "within"):
    connect()
    wrapped = DistributedDataParallel(model)
model = torch.nn.Sequential(wrapped) if how == "within" else model
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
if how in ("after", "sharded"):
    connect()
    wrapped = DistributedDataParallel(model) if how == "after" else fully_shard(model)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(wrapped(x), y).backward()
    optimizer.step()
