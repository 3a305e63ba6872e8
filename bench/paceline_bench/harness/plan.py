"""How much to measure: enough to be sure, or (quick) only enough to see that everything works."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Say = Callable[[str], None]


class BenchPlan(msgspec.Struct, frozen=True):
    """Sizes and repeats of one run of the benchmarks."""

    quick: bool = False
    seed: int = 0
    data: str | None = None
    """Folder with CIFAR-10, for `cluster`, `peers`, `pipeline` and `strategies`."""
    protocols: tuple[str, ...] = ()
    """What `cluster`, `peers`, `fidelity` and `strategies` run; empty: everything."""
    torchrec: str | None = None
    """Folder into which TorchRec was installed, for `embedding`; None: where Python finds it."""
    rivals: str | None = None
    """Folder with an interpreter for each rival of `peers` that needs one of its own."""
    simulated: bool = False
    """Whether `cluster` runs in virtual time."""
    scenes: tuple[str, ...] = ()
    """Which hosts and work `cluster` has, and which testbeds `fidelity`; none: the unequal ones, and all."""
    seeds: int = 1
    """How many seeds, from `seed` on, `cluster`, `peers` and `strategies` run with."""
    rates: tuple[float, ...] = ()
    """Learning rates of which `cluster`, `peers` and `strategies` take each entry's best; none: what is
    sensible for each."""
    targets: tuple[float, ...] = ()
    """Accuracies that `cluster` and `peers` wait for; none: the scene's."""
    results: str | None = None
    """Where `cluster`, `peers`, `fidelity`, `papers` and `strategies` keep what each run gave, and find what
    need not run again."""
    cells: tuple[str, ...] = ()
    """Patterns of what `strategies` runs; empty: some of all kinds."""
    record: str = ""
    """What the record is called; empty: after the benchmark."""
    recipes: tuple[str, ...] = ()
    """What `papers` tries; empty: everything."""

    @property
    def sizes_mb(self) -> tuple[float, ...]:
        """Sizes of the model."""
        return (0.1,) if self.quick else (1, 100)

    @property
    def teams(self) -> tuple[int, ...]:
        """Numbers of workers."""
        return (2,) if self.quick else (2, 4)

    @property
    def warm_up(self) -> int:
        """Rounds before the first that counts."""
        return 2 if self.quick else 5

    @property
    def race(self) -> int:
        """Rounds by which the other side's fastest way is found."""
        return 2 if self.quick else 9

    def rounds(self, size_mb: float) -> tuple[int, int]:
        """Blocks, and rounds per block."""
        if self.quick:
            return 2, 3
        return (10, 5) if size_mb >= 10 else (20, 20)
