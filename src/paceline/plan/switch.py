"""When to switch from BSP to ASP: Sync-Switch's search for the least share of BSP that is enough.

Paper: Li, Mangoubi, Xu, Guo, "Sync-Switch", IEEE ICDCS 2021. A binary search on the share: a share is
enough if its runs are, on average, at most `tolerance` less accurate than BSP's. It costs many runs,
and pays for itself when the same job is trained again and again; so the answer is kept.

Invariant: the share returned was enough in its own runs (or is 1, plain BSP), and the interval that
holds it halves with every share tried. If accuracy rises with the share, the answer is at most
2^-settings above the least share that is enough.

Where we differ: when a share's runs lie on both sides of the target, and their mean is nearer to it
than its standard error, chance would decide; the search ends there and keeps what it has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from math import ceil, inf, isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError, Undecodable

Train = Callable[[float, int], tuple[float, float]]
"""Trains with a share of BSP, for the n-th time: accuracy (NaN if it diverged), seconds."""


class ShareTrial(msgspec.Struct, frozen=True):
    """The runs with one share of BSP."""

    share: float
    accuracies: tuple[float, ...]
    """One for each run; 0 for a run that diverged."""
    seconds: tuple[float, ...]
    enough: bool | None = None
    """Whether the share is enough; None when that is chance."""

    @property
    def accuracy(self) -> float:
        """On average."""
        return fmean(self.accuracies)

    @property
    def error(self) -> float:
        """The standard error of the accuracy; infinite if a single run cannot tell."""
        runs = len(self.accuracies)
        return stdev(self.accuracies) / sqrt(runs) if runs > 1 else inf

    @property
    def time_s(self) -> float:
        """Seconds of a run, on average."""
        return fmean(self.seconds)

    def is_chance(self, target: float) -> bool:
        """Whether the runs lie on both sides of the target, nearer to it than their mean is certain."""
        return min(self.accuracies) < target <= max(self.accuracies) and (
            abs(self.accuracy - target) < self.error
        )


class SwitchAnswer(msgspec.Struct, frozen=True):
    """The answer, and what it cost."""

    share: float
    """Of the work that is to be done by BSP."""
    target: float
    """The accuracy that was asked for: BSP's, less the tolerance."""
    tolerance: float
    trials: tuple[ShareTrial, ...]
    """In the order they were made; the first is plain BSP."""
    ended_by_chance: bool
    cost: float
    """What the search took, in runs of BSP."""
    time: float
    """What a run with this share takes, in runs of BSP (c in the paper's terms)."""
    break_even: int | None
    """After how many such runs the search has paid for itself; None: never."""

    @property
    def phases(self) -> str:
        """The answer as a setting of sync_switch."""
        return f"bsp@{self.share!r},asp"


def search(train: Train, *, tolerance: float = 0.01, settings: int = 5, runs: int = 5) -> SwitchAnswer:
    """Try at most `settings` shares, `runs` runs each, after as many of plain BSP."""
    _check(tolerance, settings, runs)
    trials = [msgspec.structs.replace(_trial(train, 1.0, runs), enough=True)]
    target = trials[0].accuracy - tolerance
    low, high, chance = 0.0, 1.0, False
    while len(trials) <= settings and not chance:
        trial = _trial(train, (low + high) / 2, runs)
        enough, chance = trial.accuracy >= target, trial.is_chance(target)
        trials.append(msgspec.structs.replace(trial, enough=None if chance else enough))
        if enough and not chance:
            high = trial.share
        else:
            low = trial.share
    return _found(high, target, tolerance, tuple(trials), chance)


def _check(tolerance: float, settings: int, runs: int) -> None:
    if not 0 <= tolerance < inf:
        raise ConfigError(f"the tolerance must be >= 0, got {tolerance}. 0.01 is one per cent point.")
    for name, value in (("settings", settings), ("runs", runs)):
        if value < 1:
            raise ConfigError(f"a search needs {name} >= 1, got {value}. The paper uses 5.")


def _trial(train: Train, share: float, runs: int) -> ShareTrial:
    results = [train(share, repetition) for repetition in range(runs)]
    accuracies = tuple(accuracy if isfinite(accuracy) else 0.0 for accuracy, _ in results)
    return ShareTrial(share, accuracies, tuple(seconds for _, seconds in results))


def _found(
    share: float, target: float, tolerance: float, trials: tuple[ShareTrial, ...], chance: bool
) -> SwitchAnswer:
    bsp_s = trials[0].time_s
    cost = sum(sum(trial.seconds) for trial in trials) / bsp_s
    time = next(trial for trial in trials if trial.share == share).time_s / bsp_s
    pays = ceil(round(cost / (1 - time), 9)) if time < 1 else None
    return SwitchAnswer(share, target, tolerance, trials, chance, cost, time, pays)


# -- answers that are kept ------------------------------------------------------------------------


class Key(msgspec.Struct, frozen=True):
    """What an answer holds for: the same job on the same cluster."""

    script: str
    """Digest of the script: model, data and hyper-parameters as far as they are written there."""
    args: tuple[str, ...]
    """The others."""
    workers: int
    cluster: dict[str, Any]
    dials: dict[str, Any]
    """What else the run was told: weighting, clipping, seed; and how the search was made."""

    @property
    def digest(self) -> str:
        """The key in short."""
        return sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]


class KeptAnswer(msgspec.Struct, frozen=True):
    """One answer on disk."""

    key: Key
    found: SwitchAnswer


def script_digest(path: Path) -> str:
    """Tells one version of a script from another."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def recall(path: Path, key: Key) -> SwitchAnswer | None:
    """The answer that was kept for this job, if any."""
    kept = _read(path).get(key.digest)
    return None if kept is None else kept.found


def keep(path: Path, key: Key, found: SwitchAnswer) -> None:
    """Keep an answer beside the others. A reader sees the file before or after, never half of it."""
    kept = _read(path) | {key.digest: KeptAnswer(key, found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    os.replace(draft, path)


def _read(path: Path) -> dict[str, KeptAnswer]:
    if not path.exists():
        return {}
    try:
        return decode_json(path.read_bytes(), kind=dict[str, KeptAnswer])
    except Undecodable as error:
        raise ConfigError(
            f"{path} is not a file of tuning results: {error}. Remove it to start again."
        ) from None
