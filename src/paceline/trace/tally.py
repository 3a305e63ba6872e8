"""Adds up a trace to a result: one definition of every figure, for real and simulated runs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from math import isfinite, nan
from typing import Any, Literal

import msgspec

from paceline.errors import TraceError
from paceline.trace.events import (
    AnyEvent,
    Decided,
    Evaluated,
    Exchanged,
    Gap,
    LookedUp,
    ModelReady,
    Passed,
    Progress,
    Reported,
    RunEnded,
    RunStarted,
    Totals,
    WorkerJoined,
    WorkerLeft,
)
from paceline.trace.landscape import LandscapeSummary, measured
from paceline.trace.lookups import Lookups, LookupSummary, sum_up


class StalenessSummary(msgspec.Struct, frozen=True):
    """How old applied gradients were, in optimizer steps."""

    mean: float
    p95: int
    max: int


class TriggerSummary(msgspec.Struct, frozen=True):
    """Figures of event-triggered pushes (`--trigger`)."""

    steps: int
    """Calls of `optimizer.step()` by all scripts. Without the trigger each would be a push."""
    pushed: float
    """The share of these calls that pushed (q in SDDE); links carry only this share of the traffic."""
    triggered: int
    """Pushes that their norm triggered. The others were forced by the largest number or by an end of
    training."""


class Failure(msgspec.Struct, frozen=True):
    """A worker that did not finish."""

    worker: int
    t: float
    reason: str
    detail: str


class Moment(msgspec.Struct, frozen=True):
    """The moment to which a figure belongs."""

    t: float
    samples: int | None
    """Samples the model had been trained on; null if they are not counted."""
    updates: int
    worker: int
    """The worker that evaluated."""


class Result(msgspec.Struct, frozen=True):
    """The result of a run (`result.json`). Unknown figures are null, never zero."""

    run: str
    protocol: str
    settings: dict[str, Any]
    workers: int
    simulated: bool
    seed: int
    status: str
    seconds: float
    samples: int | None
    """Null if they are not counted: without a prepared loader, unless the script reports them."""
    samples_per_s: float | None
    loss: float | None
    accuracy: float | None
    target: float | None
    time_to_target_s: float | None
    updates: int
    max_clock_gap: int | None
    """The largest lead over the slowest worker at the start of an iteration."""
    staleness: StalenessSummary | None
    waiting_share: list[float | None]
    """Per worker: the share of its time in the run that it waited for others."""
    bytes_sent: int | None
    bytes_received: int | None
    emulated: dict[str, Any] | None
    failures: list[Failure]
    balance: bool = False
    """Whether every worker's batch was in proportion to its speed."""
    compress: str = "none"
    """How peers compressed what they gave to an average."""
    correct: str = "none"
    """What was done about stale gradients."""
    bytes_sent_each: list[int] | None = None
    """Per worker, rank 0 first; null when only their sum is known."""
    fabric: str | None = None
    """How vectors travelled; null when none did, as in a simulation of times."""
    barrier_looks: int | None = None
    """How often workers checked others at their own barriers; null if the store decides."""
    barrier_questions: int | None = None
    """Clocks they asked for in these checks."""
    mesh: dict[str, int] | None = None
    """The axes of the mesh; null if the model is not split."""
    bytes_by_axis: dict[str, int] | None = None
    """Bytes that its workers sent along each axis."""
    iterations: int | None = None
    """Of all workers: gradients that were pushed or applied."""
    lookups: LookupSummary | None = None
    """Figures of split embedding tables; null without them."""
    lssr: float | None = None
    """The share of all steps that were local, if the protocol chooses (SelSync); otherwise null."""
    dropped: int | None = None
    """Gradients that were not applied: dropped, or skipped as not finite; null without a store."""
    trigger: TriggerSummary | None = None
    """Figures of `--trigger`; null without it."""
    sent_ahead: float | None = None
    """Of the bytes that peers sent, the share that travelled while they continued: what OSP defers, or an
    average with a delay. Null if the protocol sends nothing in the background."""
    consensus_distance: float | None = None
    """How far replicas were from their mean at the last measurement (root mean square)."""
    landscape: LandscapeSummary | None = None
    """D-PSGD's measurements of its effective learning rate; null without them."""
    loss_at: Moment | None = None
    """The moment of the loss; null if it was not evaluated."""
    accuracy_at: Moment | None = None
    """The moment of the accuracy."""
    samples_due: int | None = None
    """Samples in the epochs that the script began; null if unknown. `samples` of them were done."""
    loss_missing: Literal["unreported", "not finite"] | None = None
    """Why `loss` is null; null if there is a loss."""


class Tally:
    """Takes events one by one and gives the result so far."""

    def __init__(self) -> None:
        self.start: RunStarted | None = None
        self.model: ModelReady | None = None
        self.end: RunEnded | None = None
        self.interrupted = False
        """Whether the run has no end event because the process that would write it is gone."""
        self.now = 0.0
        self.samples = 0
        self.pushes = 0
        self.version = 0
        self.max_gap: int | None = None
        self.staleness: Counter[int] = Counter()
        self.gaps: list[Gap] = []
        """Where events are missing. Until `Totals` the figures count only the events that are present."""
        self.failures: list[Failure] = []
        self.evaluations: list[Evaluated] = []
        self.clock: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        """Processes of the workers that take part, as far as they are known."""
        self.waiting_since: dict[int, float] = {}
        self.wait_s: dict[int, float] = {}
        self.present_s: dict[int, float] = {}
        self.compute_s: defaultdict[int, float] = defaultdict(float)
        self.travel_s: defaultdict[int, float] = defaultdict(float)
        """Per peer: how long it slept during its exchanges."""
        self._since: dict[int, float] = {}
        self._losses: deque[float] = deque(maxlen=50)
        self._lssr: float | None = None
        self._distance: float | None = None
        self._landscape: LandscapeSummary | None = None
        self._ahead_bytes: int | None = None
        self._dropped = self._withheld = self._forced = 0
        self._pushes: Counter[int] = Counter()
        self.exchanged_bytes: Counter[int] = Counter()
        """Per peer: bytes it sent."""
        self._got_bytes = 0
        """What all got."""
        self.bytes_by_axis: Counter[str] = Counter()
        """Along the axes of a mesh: what all have sent."""
        self._lookups: dict[int, Lookups] = {}
        self._looks: tuple[int, int] | None = None
        """At barriers that workers keep themselves: how many, and how many clocks they asked for."""

    @property
    def loss(self) -> float | None:
        """The last evaluated loss, or else the mean of the last reported ones; None if it diverged."""
        loss = self._last_evaluated("loss")
        if loss is None and self._losses:
            loss = sum(self._losses) / len(self._losses)
        return loss if loss is not None and isfinite(loss) else None

    @property
    def loss_missing(self) -> Literal["unreported", "not finite"] | None:
        """Why there is no loss; None: there is one, or times alone were simulated."""
        if self.loss is not None:
            return None
        if self._losses or self._last_evaluated("loss") is not None:
            return "not finite"
        times_alone = self.start is not None and self.start.simulated and self.start.script is None
        return None if times_alone else "unreported"

    @property
    def accuracy(self) -> float | None:
        """The last evaluated accuracy."""
        return self._last_evaluated("accuracy")

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        self.now = max(self.now, event.t)
        match event:
            case Decided():
                self._decided(event)
            case Passed():
                looks, asked = self._looks or (0, 0)
                self._looks = looks + event.looks, asked + event.asked
            case Exchanged():
                self.exchanged_bytes.update(dict.fromkeys(event.workers, event.bytes))
                got = event.bytes if event.answer_bytes is None else event.answer_bytes
                self._got_bytes += len(event.workers) * got
                if event.axis is not None:
                    self.bytes_by_axis[event.axis] += len(event.workers) * event.bytes
                if event.ahead is not None:
                    ahead = len(event.workers) * event.bytes if event.ahead else 0
                    self._ahead_bytes = (self._ahead_bytes or 0) + ahead
            case LookedUp():
                before = self._lookups.get(event.worker)
                self._lookups[event.worker] = before.and_then(event.lookups) if before else event.lookups
            case Reported():
                if "loss" in event.values:
                    self._losses.append(event.values["loss"])
                self._lssr = event.values.get("lssr", self._lssr)
                self._landscape = measured(self._landscape, event.values)
                self._measured_distance(event.values)
            case Evaluated():
                self.evaluations.append(event)
                self._measured_distance(event.values)
            case WorkerJoined():
                self._since[event.worker] = event.t
                if event.pid is not None:
                    self.pids[event.worker] = event.pid
            case WorkerLeft():
                self._left(event)
            case Progress():
                self.pushes, self.samples, self.version = event.pushes, event.samples, event.version
            case Totals():
                self._totals(event)
            case Gap():
                self.gaps.append(event)
                self.waiting_since.clear()
            case RunStarted():
                self.start = event
            case ModelReady():
                self.model = event
            case RunEnded():
                self.end = event

    def result(self) -> Result:
        """The figures so far."""
        start = self.start
        assert start is not None, "a trace begins with run_started"
        sent, received = self._moved()
        return Result(
            run=start.run,
            protocol=start.protocol,
            settings=start.settings,
            workers=start.workers,
            simulated=start.simulated,
            seed=start.seed,
            status=self.end.status if self.end else "interrupted" if self.interrupted else "running",
            seconds=self.now,
            samples=self.samples if self.samples or not self.pushes else None,
            samples_per_s=self.samples / self.now if self.now > 0 and self.samples else None,
            loss=self.loss,
            accuracy=self.accuracy,
            target=start.target,
            time_to_target_s=self._time_to_target(start.target),
            updates=self.version,
            max_clock_gap=self.max_gap,
            staleness=self._staleness_summary(),
            waiting_share=[self._waiting_share(rank) for rank in range(start.workers)],
            bytes_sent=sent,
            bytes_received=received,
            emulated=start.emulated,
            failures=list(self.failures),
            balance=start.balance,
            compress=start.compress,
            correct=start.correct,
            bytes_sent_each=self._sent_each(start),
            fabric=start.fabric,
            barrier_looks=self._looks[0] if self._looks else None,
            barrier_questions=self._looks[1] if self._looks else None,
            mesh=start.mesh or None,
            bytes_by_axis={axis: self.bytes_by_axis[axis] for axis in start.mesh} if start.mesh else None,
            iterations=self.pushes,
            lookups=sum_up(self._lookups, start.workers) if self._lookups else None,
            lssr=self._lssr,
            dropped=self._dropped if start.family == "paced" else None,
            trigger=None if start.trigger is None else self._triggered(),
            sent_ahead=self._sent_ahead(),
            consensus_distance=self._distance,
            landscape=self._landscape,
            loss_at=self._moment_of("loss"),
            accuracy_at=self._moment_of("accuracy"),
            loss_missing=self.loss_missing,
            samples_due=self.end.samples_due if self.end else None,
        )

    def _measured_distance(self, values: Mapping[str, float]) -> None:
        distance = values.get("consensus_distance", nan)
        self._distance = distance if isfinite(distance) else self._distance

    def _sent_ahead(self) -> float | None:
        sent = self.exchanged_bytes.total()
        return None if self._ahead_bytes is None or not sent else self._ahead_bytes / sent

    def _triggered(self) -> TriggerSummary:
        steps = self.pushes + self._withheld
        return TriggerSummary(steps, self.pushes / max(steps, 1), self.pushes - self._forced)

    def _moved(self) -> tuple[int | None, int | None]:
        """Bytes from workers and to workers, all together."""
        if self.start is not None and self.start.family != "paced":
            return self.exchanged_bytes.total(), self._got_bytes
        if self.model is None:
            return None, None
        return self.pushes * self.model.gradient_bytes, self.pushes * self.model.weight_bytes

    def _sent_each(self, start: RunStarted) -> list[int] | None:
        if start.family != "paced":
            return [self.exchanged_bytes[rank] for rank in range(start.workers)]
        if self.model is None or self._pushes.total() != self.pushes:  # a summary that tells their sum only
            return None
        return [self._pushes[rank] * self.model.gradient_bytes for rank in range(start.workers)]

    def _decided(self, event: Decided) -> None:
        self.version = event.version
        if event.pushed is not None:
            self.pushes += 1
            self._pushes[event.pushed] += 1
            self.samples += event.samples
            self.clock[event.pushed] = event.clock
            if event.fate in ("apply", "hold"):
                self.staleness[event.staleness] += 1
            self._dropped += event.fate in ("drop", "skip")
            self._withheld += event.withheld
            self._forced += event.forced
            self.waiting_since[event.pushed] = event.t
            self.compute_s[event.pushed] += event.compute_s
            self._slept(event.pushed, event)
        for worker in event.release:
            since = self.waiting_since.pop(worker, None)
            if since is None and self.gaps:
                continue
            if since is None:
                raise TraceError(f"verdict {event.number} releases rank {worker}, which does not wait.")
            self.wait_s[worker] = self.wait_s.get(worker, 0.0) + event.t - since
        if event.release:
            self.max_gap = max(self.max_gap or 0, event.gap)

    def _slept(self, rank: int, event: Decided | WorkerLeft) -> None:
        """Add the time that a peer neither computed nor waited for the answer to its push."""
        if event.more_wait_s:
            self.wait_s[rank] = self.wait_s.get(rank, 0.0) + event.more_wait_s
        self.travel_s[rank] += event.travel_s

    def _left(self, event: WorkerLeft) -> None:
        rank = event.worker
        if event.reason != "away":
            self.pids.pop(rank, None)
        if rank in self._since:
            self._slept(rank, event)
            self.present_s[rank] = self.present_s.get(rank, 0.0) + event.t - self._since.pop(rank)
        since = self.waiting_since.pop(rank, None)
        if since is not None:
            self.wait_s[rank] = self.wait_s.get(rank, 0.0) + event.t - since
        if event.reason in ("died", "failed"):
            self.failures.append(Failure(rank, event.t, event.reason, event.detail))

    def _totals(self, event: Totals) -> None:
        self.pushes, self.samples, self.max_gap = event.pushes, event.samples, event.max_gap
        self.staleness = Counter(event.staleness)
        self._dropped = event.pushes - self.staleness.total()
        self._pushes = Counter(dict(enumerate(event.pushes_each)))
        self._withheld, self._forced = event.withheld, event.forced
        self.wait_s = dict(enumerate(event.wait_s))
        self.compute_s = defaultdict(float, enumerate(event.compute_s))
        self.travel_s = defaultdict(float, enumerate(event.travel_s))
        self.waiting_since.clear()
        if event.version is not None:
            self.version = event.version
            self.exchanged_bytes = Counter(dict(enumerate(event.sent_each)))
            self._got_bytes = event.got_bytes
            self._lssr = event.lssr
            self._ahead_bytes, self._distance = event.ahead_bytes, event.consensus_distance
            self._landscape = event.landscape
            self._losses = deque((nan if x is None else x for x in event.losses), maxlen=50)
        if event.sent_along:
            self.bytes_by_axis = Counter(event.sent_along)
        if event.lookups:
            self._lookups = dict(event.lookups)
        if event.looks is not None and event.asked is not None:
            self._looks = event.looks, event.asked

    def _waiting_share(self, rank: int) -> float | None:
        present = self.present_s.get(rank, 0.0)
        if rank in self._since:
            present += self.now - self._since[rank]
        waited = self.wait_s.get(rank, 0.0)
        if rank in self.waiting_since:
            waited += self.now - self.waiting_since[rank]
        return waited / present if present > 0 else None

    def _last_evaluated(self, name: str) -> float | None:
        last = self._evaluation_of(name)
        return None if last is None else last.values[name]

    def _evaluation_of(self, name: str) -> Evaluated | None:
        return next((e for e in reversed(self.evaluations) if name in e.values), None)

    def _moment_of(self, name: str) -> Moment | None:
        last = self._evaluation_of(name)
        if last is None:
            return None
        return Moment(last.t, last.samples if self.samples else None, last.version, last.worker)

    def _time_to_target(self, target: float | None) -> float | None:
        if target is None:
            return None
        reached = (e.t for e in self.evaluations if e.values.get("accuracy", float("-inf")) >= target)
        return next(reached, None)

    def _staleness_summary(self) -> StalenessSummary | None:
        total = self.staleness.total()
        if not total:
            return None
        mean = sum(value * count for value, count in self.staleness.items()) / total
        seen = 0
        for value in sorted(self.staleness):
            seen += self.staleness[value]
            if seen >= 0.95 * total:
                break
        return StalenessSummary(mean, value, max(self.staleness))


def tally(events: Iterable[AnyEvent]) -> Tally:
    """Add up a whole trace."""
    total = Tally()
    for event in events:
        total.add(event)
    return total
