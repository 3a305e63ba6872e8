"""The books of a run: clocks, work and the trace, kept the same way by whoever keeps them.

A run with a store keeps them in the store's process; a lone worker keeps its own. Neither moves a
tensor here: the ledger is told what happened and when, and answers what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.protocols import PEERS, Decision, Fate, Pacer, Pacing, Peer, own
from paceline.protocols.core.asleep import Asleep
from paceline.protocols.core.peer_books import PeerBooks
from paceline.protocols.rules.balance import Balancer, told
from paceline.protocols.rules.slow_parking import SlowParking
from paceline.protocols.settings import resolved
from paceline.store.work.balanced import BalancedBudget, check_divisible
from paceline.store.work.budget import Batch, Budget, Source
from paceline.store.work.chunks import shards_of
from paceline.store.work.due import LoaderPasses, epochs_begun, shortfall
from paceline.store.work.recorded import RecordedBudget
from paceline.trace import events, read_trace
from paceline.trace.events import Event


def run_started(config: RunConfig, name: str, settings: dict[str, Any], simulated: bool) -> events.RunStarted:
    """The first event of every trace."""
    return events.RunStarted(
        t=0.0,
        schema=events.SCHEMA,
        run=config.run,
        protocol=name,
        settings=settings,
        workers=config.workers,
        seed=config.seed,
        simulated=simulated,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        script=config.script,
        target=config.target,
        emulated=config.emulated,
        balance=config.balance,
        compress=config.compress,
        correct="none" if config.correct == "auto" or _is_peer(name) else config.correct,
        family="split" if config.mesh else "peer" if _is_peer(name) else "paced",
        mesh=config.mesh or {},
        fabric="gloo" if config.mesh else config.fabric if config.workers > 1 else None,
        protocol_sha256=own.digest(name),
        trigger=None if _is_peer(name) else config.trigger,
    )


def parking_of(config: RunConfig, rate: float = 0.0) -> SlowParking | None:
    """What parks slow workers, if anybody is parked: a push counts by its share of a step."""
    if config.park_slow is None:
        return None
    return SlowParking(config.park_slow, lambda active: config.step_share(1.0, active), rate)


def _recorded_sha256(run: Path) -> str:
    start = next(read_trace(run))
    return start.protocol_sha256 if isinstance(start, events.RunStarted) else ""


def _is_peer(name: str) -> bool:
    """As far as this process knows: nothing is loaded for the books."""
    mine = own.known(name)
    return name in PEERS or (mine is not None and issubclass(mine.cls, Peer))


def run_not_begun(config: RunConfig, simulated: bool) -> events.RunStarted:
    """The same for a run that came to nothing before its protocol was known."""
    return run_started(config, config.protocol or "unknown", config.settings, simulated)


class Ledger:
    """Pacer, budget and trace of one run."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        protocol: Pacing,
        write: Callable[[Event], None],
        *,
        simulated: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """`settings`: those to put on record, if they are not the pacing protocol's own."""
        self.config = config
        self.named = name, resolved(protocol) if settings is None else settings
        """The protocol that stands on record, and its settings."""
        self.parking = parking_of(config)
        """Parks slow workers while the run goes on; None: nobody is."""
        self.pacer = Pacer(protocol, config.drop_staler, self.parking)
        self.asleep = Asleep()
        """Among peers: what they slept, other than for the answer to a push."""
        self.write = write
        self.budget: Budget | None = None
        self._balancer: Balancer | None = None
        self._told = 0
        self.enough = False
        """Whether training is over, however much work is left."""
        self.samples = 0
        self._units = 0
        self._batches = 0
        self.again = 0
        """Pushes of further optimizers, with data that were counted already."""
        self.withheld = 0
        """Steps of scripts whose gradients were not pushed alone, but with a later one's."""
        self.skipped = 0
        """Gradients that were not finite, and took no part."""
        self._work: tuple[Batch, ...] = ()
        self._unapplied: dict[int, list[tuple[Batch, ...]]] = {}
        self._orphaned: list[Batch] = []
        self._last_epoch = -1
        self.met = False
        """Among peers: whether replicas of several workers have been brought together."""
        self.alone: Source | None = None
        """The work of one epoch of a lone worker, who has no budget."""
        self.passes: dict[int, LoaderPasses] = {}
        """Over the loader, of each worker that has told them at its end."""
        self._behind = (0, 0)
        """Samples and units that an earlier run did, which this one goes on from."""
        self.told: dict[int, Any] = {}
        """Where workers stand themselves, as they told for the next checkpoint."""
        self.found: dict[int, Any] = {}
        """Where they stood by the checkpoint that the run goes on from."""
        self.on_member: Callable[[int, int | None], None] = lambda worker, clock: None
        """Told of everyone who begins to take part, and at which clock; None: who no longer does."""
        write(run_started(config, *self.named, simulated))
        if config.replay is not None:
            self.warn_if_changed(_recorded_sha256(Path(config.replay)), "the record was made with another")

    def warn_if_changed(self, sha256: str, had: str) -> bool:
        """Whether the file of a protocol of one's own is not the one it was; the trace says so."""
        name, mine = self.named[0], own.digest(self.named[0])
        if not (sha256 and mine) or mine == sha256:
            return False
        text = (
            f"the file of protocol {name!r} has changed: {had} (SHA-256 {sha256[:12]}, now {mine[:12]}), so "
            "decisions may differ"
        )
        self.write(events.Note(0.0, "warning", text))
        return True

    def offer(self, source: Source | None, present: Collection[int]) -> None:
        """The work there is, for the ranks that are there."""
        if self.config.balance:
            source = check_divisible(source)
        if source is not None and self.config.replay is not None:
            self.budget = RecordedBudget(source, self.config.workers, read_trace(Path(self.config.replay)))
        elif source is not None and self.config.balance:
            self._balancer = Balancer(source.batch)
            self.budget = BalancedBudget(source, self.config.workers, self._balancer)
        elif source is not None:
            self.budget = shards_of(source, self.config, self.pacer.protocol.lockstep)
            for absent in set(range(self.config.workers)).difference(present):
                self.budget.give_back(absent)

    def model(self, parameters: int, weight_bytes: int, gradient_bytes: int) -> None:
        """Note the model's size."""
        source = self.budget.source if self.budget else None
        self.write(
            events.ModelReady(
                0.0,
                parameters,
                weight_bytes,
                gradient_bytes,
                source.units if source else None,
                source.batches if source else None,
            )
        )

    def join(self, worker: int, now: float, pid: int | None = None) -> Decision:
        """A worker takes part from now on."""
        self.write(events.WorkerJoined(now, worker, pid))
        if self._balancer is not None:
            self._balancer.join(worker)
        decision = self.pacer.join(worker, now)
        self.on_member(worker, self.pacer.clocks.clock(worker))
        return self._noted(decision, now)

    def leave(self, worker: int, now: float, reason: str, detail: str = "") -> Decision | None:
        """A worker is gone, or away; only what is gone gives its work back."""
        unfinished: Iterable[Batch] = ()
        if self.budget is not None and reason != "away":
            unfinished = self.budget.give_back(worker)
        if self._balancer is not None and reason not in ("away", "stopped"):  # these are to come back
            self._balancer.leave(worker)
        lost = list(unfinished) if reason in ("died", "failed") else []
        self._orphaned += lost
        count, work = sum(each.count for each in lost), tuple((x.epoch, x.first, x.count) for x in lost)
        self.asleep.woke(worker, now)
        slept = self.asleep.take(worker)
        self.write(events.WorkerLeft(now, worker, reason, detail, count, work, *slept))  # type: ignore[arg-type]
        self.on_member(worker, None)
        if not self.pacer.clocks.is_present(worker):
            decision = self.pacer.gone(worker, now)
            return None if decision is None else self._noted(decision, now)
        return self._noted(self.pacer.leave(worker, now, reason == "away"), now)

    def push(
        self, worker: int, now: float, samples: int, used: Iterable[Batch] = (), *, usable: bool = True
    ) -> Decision:
        """A gradient is complete: what becomes of it, and who runs on."""
        self._work = self.budget.finish(worker, used) if self.budget is not None else ()
        if self._work:
            self._units += sum(batch.count for batch in self._work)
            self._batches += len(self._work)
            self._last_epoch = max([self._last_epoch, *(batch.epoch for batch in self._work)])
        self._unapplied.setdefault(worker, []).append(self._work)
        self.samples += samples
        return self.pacer.push(worker, now, samples, usable=usable)

    def carried_out(self, decision: Decision) -> None:
        """The gradients a decision took are in the weights now, or dropped."""
        for worker in decision.flushed:
            self._unapplied.pop(worker, None)
        if decision.pushed in self._unapplied and decision.fate is not Fate.HOLD:
            self._unapplied[decision.pushed].pop()

    @property
    def unapplied(self) -> list[Batch]:
        """Work whose gradients are not in the weights: a checkpoint has it done again."""
        return [batch for works in self._unapplied.values() for work in works for batch in work]

    @property
    def applied(self) -> int:
        """Samples that are in the weights, as far as work is known by what it is: gradients that are held are
        not."""
        return self.samples - sum(batch.count for batch in self.unapplied)

    def abandoned(self) -> int:
        """Samples dead workers left of the epochs that were worked on, and nobody took over."""
        left = () if self.budget is None else self.budget.returned
        lost = [batch for batch in dict.fromkeys(self._orphaned) if batch.epoch <= self._last_epoch]
        return sum(batch.overlap(rest) for batch in lost for rest in left)

    @property
    def source(self) -> Source | None:
        """The work of one epoch, as far as it is known."""
        return self.budget.source if self.budget else self.alone

    @property
    def samples_due(self) -> int | None:
        """Samples of the epochs that the script began, less what an earlier run did of them."""
        per_epoch = self.source.samples if self.source else None
        if per_epoch is None or not self.passes:
            return None
        return max(0, epochs_begun(self.passes) * per_epoch - self._behind[0])

    def undone(self) -> str:
        """What to say if the script's passes should have trained on more data; empty: on no more, or the
        script ended training itself, or the lost workers that `abandoned` counts explain it."""
        if self.source is None or self.enough or not self.passes:
            return ""
        if self.samples_due is not None:
            done, due, unit = self.samples - self._behind[0], self.samples_due, "samples"
        elif self.budget is not None:  # a sampler of whole batches, of whatever size
            units = epochs_begun(self.passes) * self.source.units
            done, due, unit = self._units - self._behind[1], units - self._behind[1], "batches"
        else:
            return ""
        missing = due - done - self.abandoned()
        average = self.budget is not None and not self.budget.even
        return shortfall(done, due, self.passes, unit, average) if missing > 0 else ""

    def unmet(self) -> str:
        """What to say if peers trained and never met; empty: they have, or there is a store in the middle."""
        pushes, (name, settings) = self.pacer.clocks.pushes, self.named
        if self.met or not pushes or not isinstance(self.pacer.protocol, PeerBooks):
            return ""
        period = f" (period={settings['period']})" if "period" in settings else ""
        return (
            f"the workers never exchanged anything: together they made {pushes} iterations, and {name} "
            f"averages less often{period}. The saved model comes from replicas that trained separately. Let "
            f"them average more often{', with --set period=...' if period else ''}, or train for longer"
        )

    def timer(self, now: float) -> Decision:
        """The time the protocol asked for has come."""
        self.write(events.Asked(now))
        return self._noted(self.pacer.timer(now), now)

    def passed(self, worker: int, now: float, looks: int, asked: int) -> Decision:
        """A worker goes on that keeps a barrier of its own."""
        self.write(events.Passed(now, worker, looks, asked))
        return self._noted(self.pacer.passed(worker, now), now)

    def released(self, now: float) -> Decision:
        """Workers go on though nobody has pushed."""
        return self._noted(self.pacer.timer(now), now)

    def pushed(
        self,
        decision: Decision,
        now: float,
        samples: int,
        compute_s: float,
        exchange_s: float,
        scale: float,
        skipped: bool = False,
        kept: tuple[int, bool] = (0, False),
    ) -> None:
        """Put a push and its verdict on record, once carried out. `kept`: how many more steps its gradient
        is the sum of, and whether it was pushed without having come to the share that triggers."""
        worker, fate = decision.pushed, decision.fate
        assert worker is not None
        assert fate is not None
        self.skipped += skipped
        self.write(
            events.Decided(
                now,
                decision.number,
                worker,
                decision.version,
                "skip" if skipped else fate.value,
                decision.flush.value if decision.flush else None,
                tuple(decision.flushed),
                decision.release,
                self.pacer.clocks.clock(worker),
                samples,
                decision.read,
                decision.staleness,
                decision.gap,
                scale,
                compute_s,
                exchange_s,
                tuple([(b.epoch, b.first, b.count) for b in self._work]),
                *self.asleep.take(worker),
                *kept,
            )
        )
        self._tell(decision, now)
        self._balance(worker, now, samples, compute_s)

    def batches(self, samples: Collection[int]) -> float:
        """How many pushes of the usual size pushes of so many samples count for.

        One each, unless batches are balanced and the samples known. The usual push is of as many of the
        loader's batches as pushes were so far: several in a script that accumulates gradients.
        """
        if not self.config.balance or self.budget is None:
            return float(len(samples))
        usual = self.budget.source.batch * (self._batches / self.pacer.clocks.pushes if self._batches else 1)
        return sum(count or usual for count in samples) / usual

    def _balance(self, worker: int, now: float, samples: int, compute_s: float) -> None:
        """Learn from a push how fast its worker is; a change of sizes goes on record."""
        balancer = self._balancer
        if balancer is None:
            return
        balancer.measured(worker, samples, compute_s)
        if balancer.revision != self._told:
            self._told = balancer.revision
            self.write(events.Note(now, "info", told(balancer.sizes)))

    def position(self) -> int:
        """Where a prepared LR scheduler stands: by samples processed, or by updates."""
        clocks = self.pacer.clocks
        if self.config.schedule == "updates":
            return clocks.version
        calls = clocks.pushes - self.again + self.withheld
        if self.budget is None:
            return calls // self.config.workers
        steps = self.budget.source.step(self._units, self.config.workers)
        if self._batches == calls:
            return steps
        return steps * calls // max(self._batches, 1)  # gradients of several batches

    @property
    def rounds(self) -> int | None:
        """How many batches a worker gets per epoch: in lockstep exactly, else on average."""
        return None if self.budget is None else -(-self.budget.source.batches // self.config.workers)

    def plan(self, epochs: int | None) -> None:
        """The script means to run this many epochs, as far as it has told."""
        per_epoch = self.budget.source.samples if self.budget else None
        self.pacer.plan(None if per_epoch is None or epochs is None else epochs * per_epoch)

    def end_work(self, worker: int, now: float, why: str) -> None:
        """A worker has ended training for all."""
        if not self.enough:
            self.enough = True
            self.write(events.WorkEnded(now, worker, why))

    def resume_at(
        self, version: int, samples: int, units: int, pushes: int, batches: int | None = None
    ) -> None:
        """Go on from a checkpoint's counts; without that of batches, every push had one."""
        self.samples, self._units, self._batches = samples, units, pushes if batches is None else batches
        self._behind = samples, units
        self.pacer.resume(version, samples, pushes)

    @property
    def samples_before(self) -> int:
        """Samples that the run which is resumed has done."""
        return self._behind[0]

    @property
    def units(self) -> int:
        """Units of work finished, for a checkpoint."""
        return self._units

    @property
    def batches_pushed(self) -> int:
        """How many of the loader's batches went into pushes, for a checkpoint."""
        return self._batches

    def _noted(self, decision: Decision, now: float) -> Decision:
        if decision.flushed or decision.release:
            self.write(
                events.Decided(
                    now,
                    decision.number,
                    None,
                    decision.version,
                    flush=decision.flush.value if decision.flush else None,
                    flushed=tuple(decision.flushed),
                    release=decision.release,
                    gap=decision.gap,
                )
            )
        self._tell(decision, now)
        return decision

    def _tell(self, decision: Decision, now: float) -> None:
        if decision.note:
            self.write(events.Note(now, "info", decision.note))
