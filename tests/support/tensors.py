"""Comparing weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def assert_close(ours: Weights, theirs: Weights, tolerance: float) -> None:
    """Equal to rounding."""
    theirs = _plain(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def assert_equal(ours: Weights, theirs: Weights) -> None:
    """Equal bit for bit."""
    theirs = _plain(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"{name} differs"


def assert_finite(weights: Weights) -> None:
    """Neither NaN nor infinity in any of them."""
    spoilt = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    assert not spoilt, f"not finite: {spoilt}"


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Sums are split among threads, so bits depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plain(weights: Weights) -> Weights:
    """Without what `torch.compile` puts into names."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in weights.items()}
