"""Advice as settings that a run takes: `advise staleness --apply FILE`, then `train --advice FILE`.

Fewer workers, groups and a threshold were each predicted with everything else as it is, so one of them is
followed, the best, and never two together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import floor
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import Weighting
from paceline.errors import ConfigError
from paceline.plan.profile.files import checked, read_table, write_json
from paceline.plan.staleness.outlook import Outlook
from paceline.plan.staleness.policies import LearningRates, PolicyStep, Promise, is_worth_it
from paceline.plan.staleness.thresholds import Threshold


class Follow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a run's configuration, by name; None: as it would be without the advice."""

    policy: str
    """What is followed, in words."""
    workers: int
    protocol: str = "asp"
    """What the theory is of."""
    settings: dict[str, Any] = {}
    weighting: Weighting | None = None
    drop_staler: int | None = None
    lr_cap: float | None = None
    """The rate that the advice is for: above it the prediction does not hold."""
    park: tuple[int, ...] = ()
    notes: list[str] = []

    @property
    def dials(self) -> dict[str, Any]:
        """What the configuration is to have."""
        named = {
            name: getattr(self, name) for name in self.__struct_fields__ if name not in ("policy", "notes")
        }
        return {name: value for name, value in named.items() if value is not None}

    @property
    def flags(self) -> str:
        """The same as one would type it."""
        typed = [f"--protocol {self.protocol}", f"--workers {self.workers}"]
        typed += [f"--set {name}={value}" for name, value in self.settings.items()]
        typed += [f"--park {rank}" for rank in self.park]
        for name, value in (("weighting", self.weighting), ("drop-staler", self.drop_staler)):
            typed += [] if value is None else [f"--{name} {value}"]
        return " ".join(typed + ([] if self.lr_cap is None else [f"--lr-cap {self.lr_cap:.6g}"]))


def follow(
    now: Outlook,
    step: PolicyStep,
    rates: LearningRates,
    safety: float,
    fewer: tuple[Outlook | None, Collection[int]],
    group: tuple[int, Outlook] | None,
    threshold: Threshold | None,
) -> Follow:
    """The policy that promises most. `fewer`: the best number of workers, and their ranks."""
    promise: Promise = now
    policy, chosen = "all workers, as it is", dict[str, Any]()
    for words, new, dials in _options(now, step, fewer, group, threshold):
        if is_worth_it(new, promise, safety):
            promise, policy, chosen = new, words, dials
    rate = step.lr
    if promise.margin > safety or promise.rate_per_s <= 0:
        policy, rate = "a lower learning rate", min(step.lr, rates.safe)
    parked = fewer[0] is not None and fewer[0].workers < now.workers and 0 not in fewer[1]
    notes = ["rank 0 would be better parked, but it leads the run: start the workers in another order."]
    cap = rate if now.workers > 1 else None  # a lone worker has no store that could cap
    chosen = {"weighting": step.weighting, "notes": notes if parked else []} | chosen
    return Follow(policy=policy, workers=now.workers, lr_cap=cap, **chosen)


def _options(
    now: Outlook,
    step: PolicyStep,
    fewer: tuple[Outlook | None, Collection[int]],
    group: tuple[int, Outlook] | None,
    threshold: Threshold | None,
) -> Iterator[tuple[str, Promise, dict[str, Any]]]:
    best, active = fewer
    if best is not None and best.workers < now.workers and 0 in active:
        parked = tuple(rank for rank in range(now.workers) if rank not in active)
        yield f"the fastest {best.workers} workers, the others parked", best, {"park": parked}
    if group is not None:
        size, outlook = group
        gathered = {"threshold": "constant", "first": size, "wait": "never"}
        whole = {"weighting": 1 / size} if step.weighting == "mean" else {}  # a flush is a whole step then
        yield (
            f"an update after {size} pushes",
            outlook,
            {"protocol": "hybrid_sgd", "settings": gathered} | whole,
        )
    if threshold is not None:
        limit = floor(threshold.updates)
        yield f"gradients staler than {limit} updates dropped", threshold, {"drop_staler": limit}


def write_advice(path: Path, advised: Follow) -> None:
    """As a file that `train --advice` takes."""
    write_json(path, advised)


def read_advice(path: Path) -> Follow:
    """What such a file says."""
    table = read_table(path, "advice")
    if not isinstance(table, dict) or "policy" not in table:
        raise ConfigError(
            f"{path} is no advice. Make it with `paceline advise staleness ... --apply {path}`."
        )
    return checked(table, Follow, path, "advice")
