"""Where delays come from: a recorded run, or a cluster that is only described.

From a run, all is measured: a cycle lasts from the verdict that released a worker to its next push,
so that waiting for others is left out; `exchange_s` tells how long the store was busy per push. Only
the queueing at the store is taken off by a model (mean-value analysis), so that other numbers of
workers can be asked about.

From a cluster file, all is modelled: cycles are drawn as the simulator draws them. So are the times
of a simulated run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.config import RunConfig, Weighting
from paceline.decoding import decode_json
from paceline.errors import ConfigError, PacelineError, Undecodable
from paceline.plan.staleness.arrivals import WorkerSet, queued_rate
from paceline.plan.staleness.delays import Samples
from paceline.sim.cluster import Cluster, Profile
from paceline.sim.compute import Recorded
from paceline.sim.request import ClusterRequest
from paceline.sim.timing import Timing
from paceline.trace import read_trace, tally
from paceline.trace.events import AnyEvent, Decided, Gap, RunStarted, Totals, WorkerJoined, WorkerLeft

ENOUGH_CYCLES = 200
DRAWN = 8192
"""Cycles drawn of one kind of worker; fewer when there are many kinds."""


@dataclass(frozen=True)
class Observed:
    """The workers, and what was seen of them."""

    crew: WorkerSet
    source: str
    measured: bool
    """Whether times were taken from real work; those of a simulated run are modelled."""
    protocol: str | None = None
    cycles: int = 0
    staleness: float | None = None
    """Mean age of applied gradients, in updates."""
    arrivals_per_s: float | None = None
    queue_s: float = 0.0
    """Wait at the store that was taken off every cycle."""
    weighting: Weighting | None = None
    shared_given: bool = False
    triggered: float | None = None
    """Of the gradients that were computed, the share that was pushed, each with those before it (q, see
    `--trigger`); a cycle is of 1/q of them then. None: all were."""
    triggered_given: bool = False

    @property
    def origin(self) -> Literal["measured", "modelled"]:
        """Where its times come from."""
        return "measured" if self.measured else "modelled"

    def sharing(self, shared_s: float) -> Observed:
        """The same workers with another time per push on what all share."""
        return replace(self, crew=WorkerSet(self.crew.cycles, shared_s), shared_given=True)

    def triggering(self, share: float) -> Observed:
        """The same workers, each pushing only after this share of its gradients: it computes 1 / share of
        them in a row, and what all share is used so much less."""
        if not 0 < share <= 1:
            raise ConfigError(
                f"--triggered is the share of gradients that are pushed, in (0, 1], got {share:g}."
            )
        if self.triggered is not None:
            raise ConfigError(
                f"in {self.source} a share of {self.triggered:.3g} was pushed, and times are those of that. "
                "Leave --triggered out, or record a run without --trigger."
            )
        return replace(self, crew=self.crew.stretched(1 / share), triggered=share, triggered_given=True)

    @property
    def always(self) -> WorkerSet:
        """The same workers, if each pushed every gradient."""
        return self.crew if self.triggered is None else self.crew.stretched(self.triggered)


def from_cluster(cluster: Cluster, source: str, seed: int = 0) -> Observed:
    """Draw cycles of every kind of worker that a cluster has."""
    timing = Timing(cluster, seed)
    kinds = [_kind(profile, rank) for rank, profile in enumerate(cluster.profiles())]
    first = {kind: rank for rank, kind in reversed(list(enumerate(kinds)))}
    draws = max(512, DRAWN * 8 // max(8, len(first)))
    laws = {kind: Samples.of(_drawn(timing, rank, cluster.apply_s, draws)) for kind, rank in first.items()}
    return Observed(WorkerSet(tuple(laws[kind] for kind in kinds), cluster.apply_s), source, measured=False)


def from_run(run: Path) -> Observed:
    """What a trace tells of the workers that took part."""
    reading = _Reading()
    for event in read_trace(run):
        reading.add(event)
    start, cycles = reading.start, [times for _, times in sorted(reading.cycles.items()) if times]
    assert start is not None, "a trace begins with run_started"
    if not cycles:
        raise ConfigError(
            f"{run} holds no whole iteration of a worker{_why(reading.summarised)}. "
            "Record a longer run, or describe the cluster with --cluster."
        )
    shared_s = min(reading.shared_s, *(sum(times) / len(times) for times in cycles))
    queue_s = min(_queue_s(cycles, shared_s), reading.idle_s(shared_s))
    laws = tuple(Samples.of([max(time - queue_s, shared_s) for time in times]) for times in cycles)
    return Observed(
        WorkerSet(laws, shared_s),
        str(run),
        measured=not start.simulated,
        protocol=start.protocol,
        cycles=sum(map(len, cycles)),
        staleness=reading.mean_staleness,
        arrivals_per_s=reading.arrivals_per_s,
        queue_s=queue_s,
        weighting=_weighting(run),
        triggered=triggered_share(run),
    )


def triggered_share(run: Path) -> float | None:
    """Of the gradients that a run's workers computed, the share that was pushed; None: all, for certain."""
    start = next(iter(read_trace(run)), None)
    if not isinstance(start, RunStarted) or start.trigger is None:
        return None
    told = tally(read_trace(run)).result().trigger
    return None if told is None else told.pushed


@dataclass
class _Reading:
    """One pass over a trace. The first cycle after joining warms up, and is left out."""

    start: RunStarted | None = None
    summarised: bool = False
    cycles: dict[int, list[float]] = field(default_factory=dict)
    _released_s: dict[int, float] = field(default_factory=dict)
    _warm: set[int] = field(default_factory=set)
    _busy_s: list[float] = field(default_factory=list)
    _compute_s: dict[int, list[float]] = field(default_factory=dict)
    _stale: list[int] = field(default_factory=list)
    _pushes: dict[int, list[float]] = field(default_factory=dict)

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        match event:
            case Decided():
                self._decided(event)
            case WorkerJoined():
                self._released_s[event.worker] = event.t
            case WorkerLeft():
                self._released_s.pop(event.worker, None)
                self._warm.discard(event.worker)
            case RunStarted():
                self.start = event
            case Gap():
                self._released_s.clear()
            case Totals():
                self.summarised = True

    def _decided(self, event: Decided) -> None:
        worker = event.pushed
        if worker is not None:
            began = self._released_s.pop(worker, None)
            if began is not None and worker in self._warm and event.t > began:
                self.cycles.setdefault(worker, []).append(event.t - began)
                self._compute_s.setdefault(worker, []).append(event.compute_s)
            self._warm.add(worker)
            self._pushes.setdefault(worker, []).append(event.t)
            self._busy_s.append(event.exchange_s)
            if event.fate in ("apply", "hold"):
                self._stale.append(event.staleness)
        for released in event.release:
            self._released_s[released] = event.t

    @property
    def shared_s(self) -> float:
        """How long the store is busy with one push, in the mean."""
        assert self.start is not None
        if self.start.simulated:  # there exchange_s counts every worker's own link too
            return _apply_s(self.start.emulated or {})
        return sum(self._busy_s) / len(self._busy_s) if self._busy_s else 0.0

    def idle_s(self, shared_s: float) -> float:
        """What a cycle has beyond computing and being served: no queue was longer than that."""
        pairs = ((self.cycles[worker], self._compute_s[worker]) for worker in self.cycles)
        return max(0.0, min((sum(c) - sum(k)) / len(c) for c, k in pairs) - shared_s)

    @property
    def mean_staleness(self) -> float | None:
        return sum(self._stale) / len(self._stale) if self._stale else None

    @property
    def arrivals_per_s(self) -> float | None:
        """The sum of the workers' own rates of pushing."""
        spans = [(len(times) - 1, times[-1] - times[0]) for times in self._pushes.values()]
        rates = [count / span for count, span in spans if span > 0]
        return sum(rates) if rates else None


def _queue_s(cycles: Iterable[list[float]], shared_s: float) -> float:
    """The wait at the store that the model sees in the recorded cycles."""
    means = [sum(times) / len(times) for times in cycles]
    cycle_s = len(means) / sum(1 / mean for mean in means)
    rate = len(means) / cycle_s
    if shared_s <= 0 or queued_rate(len(means), 0.0, shared_s) <= rate:
        return max(cycle_s - shared_s, 0.0) if shared_s > 0 else 0.0
    low, high = 0.0, cycle_s
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if queued_rate(len(means), middle, shared_s) > rate else (low, middle)
    return max(cycle_s - shared_s - low, 0.0)


def _drawn(timing: Timing, rank: int, apply_s: float, draws: int) -> list[float]:
    now, cycles = 0.0, list[float]()
    for _ in range(draws):
        pull_s = timing.pull_s(rank)
        cycles.append(pull_s + timing.compute_s(rank, now + pull_s) + timing.push_s(rank) + apply_s)
        now += cycles[-1]
    return cycles


def _kind(profile: Profile, rank: int) -> Any:
    """Ranks of one kind share a law; recorded times belong to the rank they were recorded on."""
    recorded = profile.compute
    if isinstance(recorded, Recorded):
        known = sum(1 for times in recorded.times_s if times)
        return (rank % known, profile.slow, profile.transient, profile.link, profile.drift)
    return profile


def _apply_s(emulated: Mapping[str, Any]) -> float:
    """The store's time per push in the cluster that was simulated."""
    if emulated.get("file") or emulated.get("run"):
        try:
            return msgspec.convert(dict(emulated), ClusterRequest, strict=False).cluster().apply_s
        except (PacelineError, msgspec.ValidationError):
            return 0.0
    return float(emulated.get("apply_s", 0.0))


def _weighting(run: Path) -> Weighting | None:
    """What a push counted for in a run, as its configuration says."""
    try:
        config = decode_json((run / "config.json").read_bytes(), kind=RunConfig)
    except (OSError, ConfigError, Undecodable):
        return None
    return config.weighting


def _why(summarised: bool) -> str:
    return ", since it was summed up instead of written decision by decision" if summarised else ""
