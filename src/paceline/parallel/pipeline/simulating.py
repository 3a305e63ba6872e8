"""A pipeline in virtual time: the engine's own stages, on a cluster that is only described.

Stages talk through queues, each of which has one reader and one writer, so what a stage does depends on what
comes and not on when (a Kahn network). Each worker therefore has a time of its own, which a token takes
along; workers are run one after another as far as their tokens go, and what happened is ordered afterwards.

A device's time for an iteration is a third forward and two thirds backward. Between stages a token takes the
link's latency; how large activations are is not known, so they cost no bandwidth. Copies of a stage are kept
in step by the peer protocol's own object; averaging costs what a ring of the stage's share of the model does.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from paceline.errors import RunError
from paceline.parallel.conductor.record import Record
from paceline.parallel.messages import Iteration
from paceline.parallel.pipeline import engine as e
from paceline.parallel.registry import Pipelined, parse_along
from paceline.protocols.core.operations import Agree, Average, Compute, Mix, Recall
from paceline.protocols.core.peer import Me, Peer, life
from paceline.protocols.grid import Grid
from paceline.protocols.settings import resolved
from paceline.sim.cluster import Cluster
from paceline.sim.compute import require
from paceline.sim.phantom import Phantom
from paceline.sim.simulate import SUMMARISE_ABOVE
from paceline.sim.timing import Timing
from paceline.trace import Tally
from paceline.trace.events import (
    SCHEMA,
    AnyEvent,
    Exchanged,
    ModelReady,
    Progress,
    RunEnded,
    RunStarted,
    Totals,
    WorkerJoined,
    WorkerLeft,
)

FORWARD, BACKWARD = 1 / 3, 2 / 3
Emit = Callable[[AnyEvent], None]
Tokens = deque[tuple[float, int | None]]


class SimulatedStage:
    """One stage of one copy, with a time of its own."""

    def __init__(self, rank: int, stage: e.Stage, me: Me, protocol: Peer) -> None:
        self.rank, self.stage, self.copy = rank, stage, me.rank
        self.now = self.busy_s = self.unit_s = 0.0
        self.steps: e.Steps | None = None
        self.wants: e.Operation | None = None
        """What it is about to do, as soon as it can."""
        self.activations: Tokens = deque()
        self.gradients: Tokens = deque()
        self.life = life(protocol, me)
        self.joint = next(self.life)
        self.met = 0
        """Joint operations of its column that are behind it."""
        self.ends: list[Iteration] = []

    def resume(self, answer: Any = None) -> None:
        """Find out what it does next."""
        assert self.steps is not None
        try:
            self.wants = self.steps.send(answer)
        except StopIteration:
            self.wants = self.steps = None


class Simulation:
    """All workers of a mesh."""

    def __init__(self, schedule: e.Schedule, protocol: Peer, grid: Grid, cluster: Cluster, seed: int) -> None:
        self._grid, self._copies = grid, grid.size("data")
        self._batch, self._iterations, self._batches, self._completed = cluster.batch, 0, 0, 0
        self._drain = schedule.delays.drain
        self._timing, self._profiles = Timing(cluster, seed), cluster.profiles()
        self.stage_bytes = (cluster.model_bytes or 0) // grid.size("stage")
        self.workers = [self._worker(rank, schedule, protocol) for rank in range(grid.count)]
        self._came: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """By stage and number of the joint operation: when each copy came to it."""
        self.sent: Counter[int] = Counter()
        """Bytes that ranks gave to averages and mixtures."""

    def _worker(self, rank: int, schedule: e.Schedule, protocol: Peer) -> SimulatedStage:
        place, size = self._grid.place(rank), Phantom(self.stage_bytes)
        copy = place.get("data", 0)
        me = Me(copy, self._copies, 0, size, Phantom(0), members=tuple(range(self._copies)), samples=1)
        return SimulatedStage(rank, e.Stage(schedule, place.get("stage", 0)), me, protocol)

    def run(self, batches: int, progress: Callable[[float], None] = lambda share: None) -> None:
        """So many batches for each copy, and until the pipelines are empty."""
        self._batches, self._iterations = batches, batches + self._drain
        left, stuck, total = deque(self.workers), 0, self._iterations * len(self.workers)
        while left:
            worker = left.popleft()
            stuck = 0 if self._advance(worker) else stuck + 1
            if worker.steps is not None or worker.stage.iterations < self._iterations:
                left.append(worker)
            if stuck > len(left):
                raise RunError("all stages wait for each other: this pipeline cannot go on.")
            progress(self._completed / total)

    def _advance(self, worker: SimulatedStage) -> bool:
        """As far as its tokens go; whether it moved."""
        moved = False
        while True:
            if worker.steps is None:
                if worker.stage.iterations == self._iterations:
                    return moved
                worker.unit_s = 0.0
                worker.steps = worker.stage.iteration(worker.stage.iterations < self._batches)
                worker.resume()
            if not self._act(worker):
                return moved
            moved = True

    def _act(self, worker: SimulatedStage) -> bool:
        """Do what it wants to, or complete its iteration; whether that was possible."""
        if worker.wants is not None:
            done, answer = self._carry_out(worker, worker.wants)
            if done:
                worker.resume(answer)
            if not done or worker.steps is not None:
                return done
        stage, updates = worker.stage, worker.ends[-1].clock if worker.ends else 0
        if worker.busy_s or stage.updates > updates:
            samples = self._batch if stage.last and worker.busy_s else 0
            worker.ends.append(Iteration(worker.now, worker.busy_s, stage.updates, samples, stage.staleness))
        worker.busy_s = 0.0
        self._completed += 1
        if stage.iterations == self._iterations and not stage.drained:
            worker.steps = stage.finish()
            worker.resume()
        return True

    def _carry_out(self, worker: SimulatedStage, operation: e.Operation) -> tuple[bool, Any]:
        match operation:
            case e.TakeActivation():
                return self._take(worker, worker.activations)
            case e.TakeGradient():
                return self._take(worker, worker.gradients)
            case e.SendActivation():
                self._beside(worker, 1).activations.append((self._arrival(worker), operation.token))
            case e.SendGradient():
                self._beside(worker, -1).gradients.append((self._arrival(worker), operation.token))
            case e.Forward():
                self._compute(worker, FORWARD)
            case e.Backward():
                self._compute(worker, BACKWARD + (FORWARD if operation.again else 0.0))
            case e.Update():
                return self._update(worker), None
        return True, None

    def _beside(self, worker: SimulatedStage, step: int) -> SimulatedStage:
        place = self._grid.place(worker.rank)
        return self.workers[self._grid.rank_at(place | {"stage": place["stage"] + step})]

    def _arrival(self, worker: SimulatedStage) -> float:
        return worker.now + self._profiles[worker.rank].link.latency_s

    @staticmethod
    def _take(worker: SimulatedStage, tokens: Tokens) -> tuple[bool, Any]:
        if not tokens:
            return False, None
        there, token = tokens.popleft()
        worker.now = max(worker.now, there)
        return True, token

    def _compute(self, worker: SimulatedStage, share: float) -> None:
        if not worker.unit_s:
            worker.unit_s = self._timing.compute_s(worker.rank, worker.now)
        worker.now += worker.unit_s * share
        worker.busy_s += worker.unit_s * share

    # -- along the axis data ------------------------------------------------------------------

    def _update(self, worker: SimulatedStage) -> bool:
        """What the peer protocol does with a gradient; False while others have not come."""
        if isinstance(worker.joint, Compute):
            worker.joint = worker.life.send(Phantom(self.stage_bytes))
        while not isinstance(worker.joint, Compute):
            answer: Any = None
            if isinstance(worker.joint, Average | Mix | Agree):
                if not self._meet(worker, worker.joint):
                    return False
                answer = worker.joint.value if isinstance(worker.joint, Agree) else worker.joint.vector
            elif isinstance(worker.joint, Recall):
                answer = {}
            worker.joint = worker.life.send(answer)
        return True

    def _meet(self, worker: SimulatedStage, operation: Average | Mix | Agree) -> bool:
        """Come to a joint operation; whether all whom it takes are there."""
        whom: Iterable[int] = range(self._copies)
        if isinstance(operation, Mix):
            whom = operation.topology.rows(range(self._copies), operation.step)[worker.copy]
        came = self._came[worker.stage.stage, worker.met]
        came.setdefault(worker.copy, worker.now)
        if not all(copy in came for copy in whom):
            return False
        worker.met += 1
        size = 0 if isinstance(operation, Agree) else self.stage_bytes
        worker.now = max(came[copy] for copy in whom) + self._joint_s(worker, operation, size)
        self.sent[worker.rank] += size if self._copies > 1 else 0
        return True

    def _joint_s(self, worker: SimulatedStage, operation: Average | Mix | Agree, size: int) -> float:
        """A ring's time for an average; a neighbour's vector for a mixture."""
        if self._copies == 1:
            return 0.0
        link, copies = self._profiles[worker.rank].link, self._copies
        share = 1.0 if isinstance(operation, Mix) else 2 * (copies - 1) / copies
        return link.seconds(int(size * share))


def simulate_pipeline(
    name: str,
    pipelined: Pipelined,
    grid: Grid,
    cluster: Cluster,
    *,
    iterations: int,
    seed: int = 0,
    summarise: bool | None = None,
    trace: Emit | None = None,
    progress: Callable[[float], None] | None = None,
    run: str = "simulated",
    started_at: str = "",
) -> Tally:
    """Let every copy train on so many batches, and add up what happened."""
    require(iterations >= 1, "iterations must be >= 1", iterations, "Use --iterations 100, say.")
    require(
        not cluster.event,
        "a pipeline ends with its first loss, events",
        len(cluster.event),
        "Leave them out.",
    )
    tally = Tally()

    def emit(event: AnyEvent) -> None:
        tally.add(event)
        if trace is not None:
            trace(event)

    summarised = grid.count * iterations > SUMMARISE_ABOVE if summarise is None else summarise
    schedule, protocol = pipelined.schedule(grid.size("stage")), parse_along(pipelined.data)[1]
    protocol.check(grid.size("data"))
    for event in _opening(name, pipelined, grid, cluster, run, started_at, seed, summarised):
        emit(event)
    simulation = Simulation(schedule, protocol, grid, cluster, seed)
    simulation.run(iterations, progress or (lambda share: None))
    _write(simulation, grid, emit, summarised)
    return tally


def _write(simulation: Simulation, grid: Grid, emit: Emit, summarised: bool) -> None:
    """Everything that happened, in the order of time."""
    workers = simulation.workers
    now = max(worker.now for worker in workers)
    if summarised:
        for event in _summed_up(workers, now):
            emit(event)
    else:
        record = Record(emit, len(workers))
        for worker in workers:
            for done in worker.ends:
                record.add(worker.rank, done.end_s, done)
        record.flush()
    for rank, size in sorted(simulation.sent.items()):
        emit(Exchanged(now, "send", (rank,), size, axis="data"))
    for worker in workers:
        emit(WorkerLeft(now, worker.rank, "finished"))
    emit(RunEnded(now, "finished"))


def _summed_up(workers: list[SimulatedStage], now: float) -> list[AnyEvent]:
    pushes = [len(worker.ends) for worker in workers]
    busy = tuple(sum(done.busy_s for done in worker.ends) for worker in workers)
    waited = tuple(now - each for each in busy)
    samples = sum(done.samples for worker in workers for done in worker.ends)
    version = min(worker.stage.updates for worker in workers)
    staleness = Counter(done.staleness for worker in workers for done in worker.ends)
    return [
        Progress(now, sum(pushes), samples, version, version, version, 0),
        Totals(now, sum(pushes), samples, None, dict(staleness), busy, waited, tuple(pushes)),
    ]


def _opening(
    name: str,
    pipelined: Pipelined,
    grid: Grid,
    cluster: Cluster,
    run: str,
    started_at: str,
    seed: int,
    summarised: bool,
) -> list[AnyEvent]:
    start = RunStarted(
        0.0,
        SCHEMA,
        run,
        name,
        resolved(pipelined),  # type: ignore[arg-type]
        cluster.workers,
        seed,
        simulated=True,
        started_at=started_at,
        emulated=cluster.describe(),
        summarised=summarised,
        family="split",
        mesh=grid.axes,
    )
    joined: list[AnyEvent] = [WorkerJoined(0.0, rank) for rank in range(grid.count)]
    size = cluster.model_bytes
    return [start, *([] if size is None else [ModelReady(0.0, size // 4, size, size)]), *joined]
