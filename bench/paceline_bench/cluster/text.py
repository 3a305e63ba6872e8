"""A text that every Python has: the help on its language (`pydoc_data.topics`), byte by byte.

It differs a little from one version of Python to the next; records name theirs.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

LENGTH = 64
"""Bytes that are read; the one after each is to be told."""
HELD_OUT = 10
"""One window of so many is for testing."""


def windows() -> Tensor:
    """All windows, in the order of topics; each begins with the last byte of the one before."""
    whole = "\n".join(topics[name] for name in sorted(topics)).encode()
    read = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    return read.unfold(0, LENGTH + 1, LENGTH).clone()


def training_set() -> Tensor:
    """Nine windows of ten."""
    every = windows()
    return every[torch.arange(len(every)) % HELD_OUT != 0]


def test_set(count: int) -> Tensor:
    """The others, or the first of them."""
    return windows()[::HELD_OUT][:count]
