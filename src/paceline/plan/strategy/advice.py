"""DDP, FSDP or a parameter store: the five rules of the evaluation, with the numbers that made them fire.

Paper: Ovi, "Performance Characterization of Distributed Deep Learning Strategies: A Quantitative Evaluation
of DDP, FSDP, and Parameter Server Architectures on GPU Clusters", arXiv 2505.12832. Its framework is in
words: DDP where workers are equal and start together, FSDP where memory is short, a parameter server where
workers are unequal or come and go. The thresholds are ours. Advice is a pure function of profile and wishes.

Where we differ, after `bench strategies`: a bound on staleness ends up at the pace of a worker that is always
slow, so where no accuracy may be lost batches follow speeds instead (`bsp --balance`, 1.66 times `dssp`'s
samples/s with one worker half as fast). Formulas know nothing of workers that stop for a while. So where
these come and go, and 4 points may be lost, nobody waits, whatever the formulas say.
"""

from __future__ import annotations

import msgspec

from paceline.errors import ConfigError
from paceline.plan.profile.units import size_text, time_text
from paceline.plan.strategy.models import (
    PROTOCOL,
    STRATEGIES,
    Load,
    Strategy,
    exchange_s,
    memory_bytes,
    samples_per_s,
    sent_bytes,
)

FULL = 0.9
"""Share of a device's memory that may be used."""
EQUAL = 1.15
"""Workers whose times differ by less count as equal."""
WORTH = 1.10
"""What asynchronous training must gain in samples per second to be worth its risk."""
TALKATIVE = 0.5
"""Communication over computing from which on fewer bytes are the first thing to try."""
CONVINCING = 1.05
"""What `ps-async-mod` must have been measured to gain over `ps-sync`."""
RISK = {"ps-async": "4 to 17 points in the paper", "ps-async-mod": "less than ps-async; not published"}


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    """What the user knows and wants."""

    preemptible: bool = False
    """Workers may come and go, or cannot be started together."""
    tolerance: float = 0.0
    """Points of accuracy that may be lost."""
    memory_bytes: int | None = None
    """Of a device; by default the smallest device's."""
    hosts: int = 1
    """Machines that the workers are on."""
    most_workers: int | None = None
    """How many workers could be had, for sharding; by default as many as there are."""
    measured: dict[Strategy, float] = {}
    """Samples per second that were measured on this cluster; they take the place of predictions."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 100:
            raise ConfigError(f"--tolerance is in points of accuracy, 0 to 100, got {self.tolerance:g}.")
        if self.hosts < 1:
            raise ConfigError(f"workers are on at least 1 host, got --hosts {self.hosts}.")


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, as it would go."""

    strategy: Strategy
    samples_per_s: float
    measured: bool
    memory_bytes: float
    fits: bool
    sent_bytes: float
    risk: str


class StrategyAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, why, and how the others would do."""

    choice: str
    """A strategy, with what goes with it."""
    command: str
    rule: int
    """Which of the five fired."""
    because: str
    hints: tuple[str, ...]
    rows: tuple[StrategyRow, ...]
    """What fits first, then the fastest first."""


def advise(load: Load, wanted: Constraints) -> StrategyAdvice:
    """Ask the rules in order; the first that applies decides."""
    capacity = _capacity(load, wanted)
    rows = _rows(load, wanted, capacity)
    decided = _memory(load, wanted, capacity) or _lockstep(load, wanted) or _store(load, wanted, rows)
    choice, command, rule, because = decided
    hints = tuple(hint for hint in (_state_elsewhere(rule, rows), _link(load), _modified(rows)) if hint)
    return StrategyAdvice(choice=choice, command=command, rule=rule, because=because, hints=hints, rows=rows)


def _capacity(load: Load, wanted: Constraints) -> float:
    return FULL * (wanted.memory_bytes or load.cluster.memory_bytes) - load.cluster.overhead_bytes


def _rows(load: Load, wanted: Constraints, capacity: float) -> tuple[StrategyRow, ...]:
    rows = [
        StrategyRow(
            strategy=strategy,
            samples_per_s=wanted.measured.get(strategy, samples_per_s(strategy, load)),
            measured=strategy in wanted.measured,
            memory_bytes=memory_bytes(strategy, load),
            fits=memory_bytes(strategy, load) <= capacity,
            sent_bytes=sent_bytes(strategy, load),
            risk=RISK.get(strategy, "none"),
        )
        for strategy in STRATEGIES
    ]
    return tuple(sorted(rows, key=lambda row: (not row.fits, -row.samples_per_s)))


Decided = tuple[str, str, int, str]


def _memory(load: Load, wanted: Constraints, capacity: float) -> Decided | None:
    """Rule 1: what does not fit is sharded, over the fewest workers that hold it."""
    needed = memory_bytes("ddp", load)
    if needed <= capacity:
        return None
    why = f"a replica takes {size_text(needed)}, and {size_text(max(capacity, 0))} may be used"
    most = wanted.most_workers or load.workers
    for count in range(2, most + 1):
        if memory_bytes("fsdp", load, count) <= capacity:
            command = "paceline plan osdp SCRIPT --cluster FILE --out plan.json"
            return f"fsdp over {count} workers", command, 1, why
    least = size_text(memory_bytes("fsdp", load, most))
    return (
        "fsdp with activation checkpointing, then offloading or a split model",
        "paceline train SCRIPT --mesh stage=N, once the script hands its model to a pipeline "
        "(docs/how-to-pipeline.md)",
        1,
        f"{why}; sharded over {most} workers it still takes {least}",
    )


def _state_elsewhere(rule: int, rows: tuple[StrategyRow, ...]) -> str | None:
    """Beside rule 1: a store keeps the optimizer's state, which may be all that does not fit."""
    if rule != 1 or not any(row.fits for row in rows if row.strategy == "ps-sync"):
        return None
    return (
        "rule 1: a worker of a store (--protocol bsp) fits as well, if the store's host has room for the "
        "optimizer's state."
    )


def _lockstep(load: Load, wanted: Constraints) -> Decided | None:
    """Rule 2: equal workers that start together run in lockstep."""
    if wanted.preemptible or load.unequal >= EQUAL:
        return None
    why = f"the slowest worker takes {load.unequal:.2f} times as long as the fastest, below {EQUAL}"
    if wanted.hosts == 1:
        return "ddp", f"paceline train SCRIPT --protocol {PROTOCOL['ddp']}", 2, why
    why += "; over several hosts Paceline's allreduce goes through the first one's link, torch's does not"
    return "ddp", f"torchrun --nnodes {wanted.hosts} SCRIPT, with torch's DistributedDataParallel", 2, why


def _store(load: Load, wanted: Constraints, rows: tuple[StrategyRow, ...]) -> Decided:
    """Rule 3: unequal or passing workers meet at a parameter store."""
    speed = {row.strategy: row.samples_per_s for row in rows}
    gain = speed["ps-async"] / speed["ps-sync"]
    why = (
        "workers may come and go"
        if wanted.preemptible
        else f"the slowest takes {load.unequal:.2f} times as long"
    )
    figures = f"ps-async makes {gain:.2f} times the samples/s of ps-sync"
    if wanted.tolerance >= 4 and (gain > WORTH or wanted.preemptible):
        return (
            "ps-async",
            "paceline train SCRIPT --protocol asp",
            3,
            f"{why}; {figures}; 4 points may be lost",
        )
    if gain > WORTH:
        return (
            "ps-sync with batches that follow speeds",
            "paceline train SCRIPT --protocol bsp --balance",
            3,
            f"{why}; {figures}, but less than 4 points may be lost, so all stay in lockstep",
        )
    return (
        "ps-sync with backup workers",
        "paceline train SCRIPT --protocol backup_bsp",
        3,
        f"{why}; {figures}, not more than {WORTH}",
    )


def _link(load: Load) -> str | None:
    """Rule 4: where bytes take longer than computing, send fewer of them."""
    talk, work = exchange_s("ddp", load), max(load.seconds)
    if talk <= TALKATIVE * work:
        return None
    return (
        f"rule 4: an all-reduce takes {time_text(talk)}, computing {time_text(work)}. Try gradient "
        "accumulation, --compress or local_sgd first; FSDP would send half as much again as DDP."
    )


def _modified(rows: tuple[StrategyRow, ...]) -> str | None:
    """Rule 5: the modified asynchronous server only where it was measured to gain."""
    seen = {row.strategy: row for row in rows if row.measured}
    if "ps-async-mod" not in seen or "ps-sync" not in seen:
        return None
    gain = seen["ps-async-mod"].samples_per_s / seen["ps-sync"].samples_per_s
    verdict = "it may be used" if gain > CONVINCING else "leave it, as the paper found"
    return f"rule 5: ps-async-mod was measured at {gain:.2f} times ps-sync: {verdict}."
