"""What a run was due to do, by the passes over the loader that its script began, and why it did less.

Whoever keeps a run's books asks at the end: the ledger, the conductor of a mesh, and a plan's launcher.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class LoaderPasses(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker's passes over its prepared loader."""

    begun: int = 0
    """How many the script began, those included that a resumed script repeats."""
    broken: int = 0
    """How many of them the script ended before the loader did."""
    after: int = 0
    """Batches that the first of these had."""
    length: int = 0
    """What len(loader) is there."""
    unused: int = 0
    """Batches that were handed out and that no step used."""


def epochs_begun(passes: Mapping[int, LoaderPasses]) -> int:
    """How many epochs of the data the script asked for: plain PyTorch gives one per pass."""
    return max((each.begun for each in passes.values()), default=0)


def shortfall(
    done: int, due: int, passes: Mapping[int, LoaderPasses], unit: str = "samples", average: bool = False
) -> str:
    """A sentence about work that the script's passes left undone: how much, and why. `average`: whether
    len(loader) is no more than that, because workers share the batches as they come."""
    broken = {rank: each for rank, each in sorted(passes.items()) if each.broken}
    counted = any(each.after >= each.length for each in broken.values())
    why = _broken_off(broken) if broken else _unused(passes)
    return f"the run trained on {done} of {due} {unit}{why}" + (_COUNTED if average and counted else "")


_COUNTED = (
    ". With several workers len(loader) is an average: a fast worker has more batches in an epoch, a slow "
    "one fewer. Loop with `for batch in loader`, or give every worker an equal share with --shards equal"
)


def _broken_off(passes: Mapping[int, LoaderPasses]) -> str:
    total = sum(each.broken for each in passes.values())
    first = min(passes, key=lambda rank: passes[rank].after / max(passes[rank].length, 1))
    return (
        f": the script broke off {'1 pass' if total == 1 else f'{total} passes'} over the loader (rank "
        f"{first} after {passes[first].after} batches; len(loader) is {passes[first].length})"
    )


def _unused(passes: Mapping[int, LoaderPasses]) -> str:
    total = sum(each.unused for each in passes.values())
    return f": no optimizer step used {'1 batch' if total == 1 else f'{total} batches'}" if total else ""
