"""Imported by the process that forks all workers of a benchmark, and by nobody else.

What it does, it does while it is imported: making the first optimizer loads the rest of torch,
which takes seconds, once here instead of in every worker.
"""

from __future__ import annotations

import torch

import paceline.runtime.serve  # noqa: F401

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
