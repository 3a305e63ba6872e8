"""Where a process's random number generators stand: torch's, Python's, NumPy's, GPUs', a loader's own."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any, cast

import msgspec
import numpy as np
import torch

from paceline.fabric import gpu


class RandomState(msgspec.Struct, frozen=True):
    """Taken at one moment, put back at another. Plain data, so that a checkpoint can keep it."""

    torch: bytes
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    own: tuple[bytes, ...]
    """Generators that the loader or its sampler were given."""
    cuda: tuple[bytes, ...] = ()
    """Of the GPUs, by number; none where none was in use, and in older checkpoints."""

    @classmethod
    def now(cls, loader: Any = None) -> RandomState:
        """As it stands."""
        kind, keys, place, has_gauss, gauss = cast("Any", np.random.get_state())
        return cls(
            _bytes(torch.get_rng_state()),
            random.getstate(),
            (kind, tuple(keys.tolist()), place, has_gauss, gauss),
            tuple(_bytes(generator.get_state()) for generator in generators(loader)),
            gpu.random_states(),
        )

    def restore(self, loader: Any = None) -> None:
        """Put it back."""
        torch.set_rng_state(_tensor(self.torch))
        random.setstate(self.python)
        kind, keys, place, has_gauss, gauss = self.numpy
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
        gpu.restore_random_states(self.cuda)
        for generator, state in zip(generators(loader), self.own, strict=False):
            generator.set_state(_tensor(state))


def seed(number: int, loader: Any = None) -> None:
    """Let all of them begin anew."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
    for generator in generators(loader):
        generator.manual_seed(number)


def digest(loader: Any) -> str:
    """Tells apart where generators stand that a loader, or its sampler, was given; empty: it has none."""
    states = [_bytes(generator.get_state()) for generator in generators(loader)]
    return sha256(b"".join(states)).hexdigest() if states else ""


def seed_apart(number: int, rank: int) -> None:
    """Let this worker draw other numbers than the others do, though all may have run the same seeds.

    The first one's stay as they are, so that it draws what a script alone would."""
    if rank:
        mixed = (torch.initial_seed() + number * 1_000_003 + rank * 7_368_787) & 0x7FFF_FFFF
        torch.manual_seed(mixed)
        random.seed(mixed)
        np.random.seed(mixed)


def generators(loader: Any) -> list[torch.Generator]:
    """Those that a loader, or its sampler, was given."""
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
