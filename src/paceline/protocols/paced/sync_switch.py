"""Sync-Switch: one protocol first and another later; by default a short BSP phase, then ASP.

Paper: Li, Mangoubi, Xu, Guo, "Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep
Learning", IEEE ICDCS 2021, arXiv 2104.08364.

Promise: each phase keeps its own protocol's promise; all start a phase together, on the same weights.

When: a short phase in lockstep is enough to reach the accuracy of lockstep, and the rest may be
asynchronous.

A run is a list of phases, each a protocol with a share of the work. At the end of a phase no worker is
released; the old rule handles pushes until all wait. Then the new rule starts, with no memory and all clocks
equal. Weights, momentum and data position belong to the store and stay as they are, so nothing needs to be
handed over. `paceline tune switch` finds the share.

Learning rate: with `--weighting mean` a BSP step counts whole and an ASP push 1/n of it, so the
learning rate given is the paper's n x eta for BSP and makes eta for ASP: its linear scaling rule.

Online, in a lockstep phase that is not the last, the protocol looks for stragglers (see stragglers.py):
  none     ignore them
  greedy   use the next phase's protocol until no straggler is left, then switch back; the work done
           in between counts for the next phase
  elastic  set them aside until the phase ends; meanwhile a step counts (group / all workers)
Neither changes how many steps the phase makes: its end is counted in whole steps of all workers.

Invariant: a phase makes as many steps as its share of the work holds, rounded to the nearest (but at
least one), and what is left of the work goes to the last phase. One phase alone decides as its
protocol does; bsp@0,asp as ASP, bsp@1,asp as BSP. No online action once the last phase has begun.

With `asp_ramp_s` workers start the first phase after lockstep one after another, because workers that start
together on equal weights push nearly the same gradient. (The authors' scripts have a line for this, switched
off.) They still start on the weights of the switch or newer ones.

Where we differ: the paper restarts its cluster to switch. Momentum policies are factors on the optimizer's
own momentum, and `zero` sets the coefficient, not the buffer: a cleared buffer would refill within a few
dozen pushes. Stages are the paper's share of the work, not its step counts. If the total work is unknown (no
`total`, and the script does not loop over `pace.epochs`), a phase that ends at a share of it never ends, and
the trace has a note about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar, Literal

from msgspec.structs import replace

from paceline.errors import ConfigError
from paceline.protocols.core.base import Fate, Flush, Pacing, Verdict
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.paced.phases import parse_phases
from paceline.protocols.rules.stragglers import Stragglers

Momentum = Literal["keep", "zero", "scaled", "two_stage", "double", "linear"]
Online = Literal["none", "greedy", "elastic"]
STAGES = {"two_stage": 1 / 16, "double": 1 / 10, "linear": 1 / 32}
"""How much of the work one stage of a momentum policy lasts."""


def momentum_factor(policy: Momentum, stage: int, workers: int) -> float:
    """The share of the momentum that is used in a stage after lockstep has ended; stage 0 is the first."""
    match policy:
        case "keep":
            return 1.0
        case "zero":
            return 0.0
        case "scaled":
            return 1 / workers
        case "two_stage":
            return 1.0 if stage else 1 / workers
        case "double":
            return min(1.0, 2.0 ** min(stage, 64) / workers)
        case "linear":
            return min(1.0, (stage + 1) / workers)


@dataclass
class SyncSwitch:
    lockstep: ClassVar[bool] = False

    phases: str = "bsp@0.0625,asp"
    """The protocols in order, each with its settings and its end: a share of the work, or a number of samples
    if above 1. For instance bsp@0.25,ssp(staleness=3)@0.6,asp."""
    total: int = 0
    """Samples of the whole run, for ends given as shares. 0: as many as the script plans."""
    momentum: Momentum = "keep"
    """What happens to momentum when lockstep ends: keep, zero, scaled (1/n), or 1/n at first and then all of
    it (two_stage), twice as much (double) or 1/n more (linear) in each stage."""
    online: Online = "none"
    """What to do about stragglers in lockstep: none, greedy (switch for a while) or elastic (evict)."""
    window: int = 10
    """Pushes per worker after which speeds are compared."""
    consecutive: int = 5
    """How many windows in a row make a worker a straggler, or end that."""
    slower: float = 0.1
    """How far below the mean speed a straggler is at least, as a share."""
    smallest_group: float = 0.5
    """Share of the workers that always stay, rounded up."""
    asp_ramp_s: float = 0.0
    """Seconds between the starts of two workers when lockstep ends for good. 0: all start at once."""

    at: int = field(init=False, default=0)
    detour: bool = field(init=False, default=False)
    leaving: Literal["", "next", "detour", "back"] = field(init=False, default="")
    shift: float = field(init=False, default=0.0)
    detour_from: int = field(init=False, default=0)
    lockstep_until: int | None = field(init=False, default=None)
    crew: int = field(init=False, default=1)
    factor: float = field(init=False, default=1.0)
    warned: bool = field(init=False, default=False)
    ramp: dict[int, float] = field(init=False, default_factory=dict)
    watch: Stragglers = field(init=False)
    rules: list[Pacing] = field(init=False)

    def __post_init__(self) -> None:
        self._plan = parse_phases(self.phases)
        self.rules = [phase.rule() for phase in self._plan]
        self.watch = Stragglers(self.consecutive, self.slower)
        if self.total < 0:
            raise ConfigError(f"SyncSwitch total must be >= 0 samples, got {self.total}. 0: as planned.")
        for name in ("window", "consecutive"):
            if getattr(self, name) < 1:
                raise ConfigError(f"SyncSwitch {name} must be >= 1, got {getattr(self, name)}.")
        if not 0 <= self.asp_ramp_s < float("inf"):
            raise ConfigError(f"SyncSwitch asp_ramp_s must be >= 0 seconds, got {self.asp_ramp_s:g}.")
        if not 0 < self.slower < 1 or not 0 < self.smallest_group <= 1:
            raise ConfigError(
                "SyncSwitch slower must be in 0..1 and smallest_group in 0..1 (1: nobody is evicted), "
                f"got slower={self.slower:g}, smallest_group={self.smallest_group:g}."
            )

    @property
    def rule(self) -> Pacing:
        """The protocol in force."""
        return self.rules[self.at + self.detour]

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if clocks.pushes - clocks.resumed_pushes <= (pushed is not None) and not self.detour:
            # Nothing was judged yet, so what is over needs no barrier to end.
            self._skip_what_ends_by(clocks, clocks.resumed_samples + self.shift)
            self.ramp = {}
        verdict = self.rule.decide(clocks, pushed)
        if self.ramp:
            verdict = self._ramped(clocks, verdict)
        if self.at < len(self.rules) - 1:
            verdict = self._until_the_end(clocks, pushed, verdict)
        return verdict if self.momentum == "keep" else self._with_momentum(clocks, verdict)

    # -- the phase and its end ------------------------------------------------------------------

    def _until_the_end(self, clocks: Clocks, pushed: int | None, verdict: Verdict) -> Verdict:
        if clocks.benched and verdict.release:
            verdict = self._of_a_group(clocks, verdict)
        stragglers = self._stragglers(clocks, pushed)
        self.leaving = self.leaving or self._reason_to_leave(clocks, verdict, stragglers)
        if not self.leaving:
            if self.online == "elastic":
                verdict = self._elastic(clocks, verdict, stragglers or [])
            return verdict if self.warned else self._warning(clocks, verdict)
        if clocks.waiting_count < len(clocks.active):
            return replace(verdict, release=())
        return self._switch(clocks, verdict)

    def _reason_to_leave(
        self, clocks: Clocks, verdict: Verdict, stragglers: list[int] | None
    ) -> Literal["", "next", "detour", "back"]:
        if not self.detour and verdict.release and self._would_pass_the_end(clocks, len(verdict.release)):
            return "next"
        if self.online != "greedy" or stragglers is None or self.detour == bool(stragglers):
            return ""
        return "back" if self.detour else "detour"

    def _would_pass_the_end(self, clocks: Clocks, releases: int) -> bool:
        """Whether stopping now is nearer to the phase's end than releasing these workers, counting work under
        way."""
        computing = len(clocks.active) - clocks.waiting_count
        ahead = computing + (releases + len(clocks.benched)) / 2
        return self._progress(clocks) + ahead * clocks.batch > self._end(clocks)

    def _progress(self, clocks: Clocks) -> float:
        """The work that counts for the phase: without detours, and including the work of workers set
        aside."""
        return clocks.total_samples + self.shift

    def _end(self, clocks: Clocks) -> float:
        return self._plan[self.at].end_samples(self.total or clocks.planned)

    def _skip_what_ends_by(self, clocks: Clocks, progress: float) -> None:
        while self.at < len(self.rules) - 1 and self._end(clocks) <= progress:
            self.at += 1

    # -- the switch -----------------------------------------------------------------------------

    def _switch(self, clocks: Clocks, verdict: Verdict) -> Verdict:
        """All workers wait: apply the old rule's last verdict, then start the new rule."""
        was_lockstep, leaving = self.rule.lockstep, self.leaving
        self.leaving, self.warned = "", False
        if leaving == "detour":
            self.detour, self.detour_from = True, clocks.total_samples
        elif leaving == "back":
            self.detour, self.shift = False, self.shift - (clocks.total_samples - self.detour_from)
        else:
            self.at += 1
            self._skip_what_ends_by(clocks, self._progress(clocks))
        running = self.at + self.detour
        self.rules[running] = self._plan[running].rule()
        self.watch.begin_window()
        self._mark_lockstep(clocks, was_lockstep)
        left_over = clocks.held or verdict.fate is Fate.HOLD
        self.ramp = {}
        if self.asp_ramp_s and leaving == "next" and was_lockstep and not self.rule.lockstep:
            waiting = sorted(clocks.waiting())
            self.ramp = {worker: clocks.now + i * self.asp_ramp_s for i, worker in enumerate(waiting)}
        begins = Verdict(
            fate=verdict.fate,
            flush=verdict.flush or (Flush.PART if left_over else None),
            release=(*clocks.waiting(), *clocks.benched),
            weight=verdict.weight,
            lr_scale=verdict.lr_scale,
            rebase=True,
            note=f"{self._named(running)} begins after {clocks.total_samples} samples",
        )
        return self._ramped(clocks, begins) if self.ramp else begins

    def _ramped(self, clocks: Clocks, verdict: Verdict) -> Verdict:
        """Release the workers whose turn has come."""
        waits = {worker: at for worker, at in self.ramp.items() if clocks.is_waiting(worker)}
        self.ramp = {worker: at for worker, at in waits.items() if at > clocks.now}
        turn = (worker for worker in waits if worker not in self.ramp)
        release = dict.fromkeys((*verdict.release, *turn))
        asked = [] if verdict.ask_again_s is None else [verdict.ask_again_s]
        asked += [at - clocks.now for at in self.ramp.values()]
        return replace(
            verdict,
            release=tuple(worker for worker in release if worker not in self.ramp),
            ask_again_s=min(asked, default=None),
        )

    def _named(self, index: int) -> str:
        return f"phase {index + 1} of {len(self._plan)} ({self._plan[index].text})"

    def _warning(self, clocks: Clocks, verdict: Verdict) -> Verdict:
        """Warn if the length of the run is still unknown after every worker has pushed."""
        self.warned = clocks.slowest > 0
        if not self.warned or self._end(clocks) < float("inf"):
            return verdict
        text = f"the amount of work is unknown, so {self._named(self.at)} does not end. "
        return replace(verdict, note=text + "Loop over pace.epochs(...), or use --set total=SAMPLES.")

    # -- momentum -------------------------------------------------------------------------------

    def _mark_lockstep(self, clocks: Clocks, was_lockstep: bool) -> None:
        if self.rule.lockstep:
            self.lockstep_until = None
        elif was_lockstep:
            self.lockstep_until = clocks.total_samples
            self.crew = len(clocks.active) + len(clocks.benched)

    def _with_momentum(self, clocks: Clocks, verdict: Verdict) -> Verdict:
        factor = 1.0
        if self.lockstep_until is not None:
            factor = momentum_factor(self.momentum, self._stage(clocks), max(1, self.crew))
        if factor == self.factor:
            return verdict
        self.factor = factor
        return replace(verdict, adjust={"momentum": factor})

    def _stage(self, clocks: Clocks) -> int:
        assert self.lockstep_until is not None
        total = self.total or clocks.planned
        length = STAGES.get(self.momentum, 1.0) * (total or float("inf"))
        return int((clocks.total_samples - self.lockstep_until) // max(length, 1.0))

    # -- stragglers -----------------------------------------------------------------------------

    def _stragglers(self, clocks: Clocks, pushed: int | None) -> list[int] | None:
        """Time the push. Returns the stragglers if a window ends with it, otherwise None."""
        if self.online == "none" or pushed is None or not (self.rule.lockstep or self.detour):
            return None
        self.watch.timed(pushed, clocks.run_s(pushed) or 0.0)
        all_wait = clocks.waiting_count == len(clocks.active)
        if self.watch.count < self.window * len(clocks.active) or not (all_wait or self.detour):
            return None
        return self.watch.look(clocks.active)

    def _of_a_group(self, clocks: Clocks, verdict: Verdict) -> Verdict:
        """A step of the remaining workers counts as a step but moves the weights less."""
        group, aside = len(clocks.active), len(clocks.benched)
        self.shift += aside * clocks.batch
        return replace(verdict, lr_scale=verdict.lr_scale * group / (group + aside))

    def _elastic(self, clocks: Clocks, verdict: Verdict, stragglers: list[int]) -> Verdict:
        """Set stragglers aside, slowest first. If too few workers would be left, all take part again."""
        group, aside = len(clocks.active), tuple(clocks.benched)
        least = ceil(self.smallest_group * (group + len(aside)))
        if aside and group < least:
            return replace(verdict, release=(*verdict.release, *aside))
        evicted = tuple(stragglers[: group - least])
        if not evicted:
            return verdict
        kept = set(verdict.release).difference(evicted)
        release = tuple(worker for worker in verdict.release if worker in kept)
        ranks = ", ".join(map(str, sorted(evicted[:8]))) + (", ..." if len(evicted) > 8 else "")
        note = f"slow, and set aside until {self._named(self.at)} ends: rank {ranks}"
        return replace(verdict, release=release, bench=evicted, note=note)
