"""The corrections of one store: their memory, and the passes over the weights in which they work.

The store calls this where it would have called its optimizer, or handed its weights out; without a correction
it does not, and nothing here is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from paceline.corrections import NONE, Named, parse_correction
from paceline.store.corrections.dana import ADAMS, SECOND, DanaAdam, DanaPush, DanaSGD, Extent, Momentum
from paceline.store.corrections.dc import AdaptiveDelayCompensation, DelayCompensation
from paceline.store.corrections.gap import GapAware
from paceline.store.corrections.plain import Momenta, State
from paceline.store.corrections.rule import GradientRule
from paceline.store.corrections.spans import Span, Vectors, spans
from paceline.store.lanes import Lanes
from paceline.store.layout import Layout
from paceline.store.optimizers import GroupSettings, OptimizerSpec

MARK = "~"
"""Begins the names of what is a correction's among an optimizer's state."""
TOTAL = "total"


class Flats(Protocol):
    """A gradient, region by region."""

    flats: list[Tensor]
    missing: frozenset[int]


class GradientPart(NamedTuple):
    """One worker's gradient in a step, and its share of it."""

    worker: int
    gradients: Flats
    share: float
    gone: bool = False
    """Whether the worker has left: then its momentum is not kept."""


Parts = Sequence[GradientPart]


class Stride(NamedTuple):
    """How far a step of several gradients goes."""

    scale: float
    """On the learning rate."""
    one: float
    """What a single gradient counts, of such a step."""
    active: int
    """Workers that take part."""
    factor: float = 1.0
    """On the gradients: clipping."""


Weights = dict[int, list[float]]
"""Workers, and what their momenta count in the sum, by parameter group."""


class Change(NamedTuple):
    """Momenta to take out of the sum before a step, and to put in after it."""

    leaving: Weights
    entering: Weights


class Corrections:
    """All that a run corrects with."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, name: str) -> None:
        named = parse_correction(name)
        self.name = name
        self._layout, self._spec = layout, spec
        self._rule = make_rule(named)
        self._momentum = make_momentum(spec) if named.dana else None
        self._order = [index for group in spec.groups for index in group.parameters]
        """Parameters as the optimizer counts them."""
        self._all = spans(layout, spec)
        self._own: dict[int, Vectors] = {}
        self._counted: set[int] = set()
        """Whose momentum is in the sum."""
        self.awake: frozenset[int] | None = None
        """Who computes, or is about to: these momenta are to be in the sum. None: everybody's."""
        self._last: list[tuple[Vectors, list[float]]] = []
        """The momentum of the worker that left when nobody else had one, and what it counted by group."""
        wanted = () if self._momentum is None else (TOTAL, *self._momentum.memory)
        wanted += () if self._rule is None else self._rule.memory
        self._shared = {each: Vectors(layout) for each in wanted}

    @property
    def mends(self) -> bool:
        """Whether it changes gradients as they come."""
        return self._rule is not None

    @property
    def steps(self) -> bool:
        """Whether it takes the optimizer's place, and hands out a look-ahead."""
        return self._momentum is not None

    @property
    def watches(self) -> bool:
        """Whether it wants to see how far a step of the optimizer went."""
        return self._rule is not None and self._rule.watches

    @property
    def workers(self) -> list[int]:
        """Who has a momentum."""
        return sorted(self._own)

    def own(self, worker: int) -> Vectors:
        """A worker's momentum."""
        if worker not in self._own:
            self._own[worker] = Vectors(self._layout)
        return self._own[worker]

    @property
    def total(self) -> Vectors:
        """The sum of the momenta of all who compute."""
        return self._shared[TOTAL]

    # -- passes -------------------------------------------------------------------------------

    def mend(self, gradients: Flats, now: Sequence[Tensor], read: Sequence[Tensor], lanes: Lanes) -> None:
        """A gradient has come that was computed at `read`."""
        if self._rule is not None:
            lanes.map(partial(self._mend, self._rule, gradients, now, read), self._spans(gradients.missing))

    def _mend(
        self, rule: GradientRule, gradients: Flats, now: Sequence[Tensor], read: Sequence[Tensor], span: Span
    ) -> None:
        gradient, weights, seen = (flats[span.region][span.part] for flats in (gradients.flats, now, read))
        rule.mend(gradient, weights, seen, self._shared_in(span))

    def moved(self, before: Sequence[Tensor], now: Sequence[Tensor], lanes: Lanes) -> None:
        """The optimizer has made a step."""
        lanes.map(lambda span: self._moved(before[span.region][span.part], now, span), self._all)

    def _moved(self, before: Tensor, now: Sequence[Tensor], span: Span) -> None:
        if self._rule is not None:
            self._rule.moved(before, now[span.region][span.part], self._shared_in(span))

    def step(
        self,
        parts: Parts,
        weights: Sequence[Tensor],
        settings: list[GroupSettings],
        stride: Stride,
        targets: Sequence[Sequence[Tensor]],
        lanes: Lanes,
    ) -> None:
        """One step in the optimizer's place; the look-ahead goes to the targets, piece by piece."""
        momentum = self._momentum
        assert momentum is not None
        for part in parts:
            self.own(part.worker)
        workers = [part.worker for part in parts]
        leaving = self._leaving(workers)
        momentum.begin(workers, settings, stride.one, stride.active)
        change = Change(leaving, self._entering())
        missing = frozenset[int].intersection(*(frozenset(part.gradients.missing) for part in parts))
        gone = {part.worker for part in parts if part.gone}
        at_once = () if gone or missing else targets
        work = partial(self._step, momentum, parts, weights, settings, stride, change, at_once)
        lanes.map(work, self._spans(missing))
        for worker in gone:
            self.forget(worker, lanes)
        if missing:
            lanes.map(self._add_up, self._all)
        if gone or missing:
            for target in targets:
                self.hand_out(weights, target, lanes)

    def _step(
        self,
        momentum: Momentum,
        parts: Parts,
        weights: Sequence[Tensor],
        settings: list[GroupSettings],
        stride: Stride,
        change: Change,
        targets: Sequence[Sequence[Tensor]],
        span: Span,
    ) -> None:
        group, region, cut = span
        now, total, shared = weights[region][cut], self.total.part(span), self._shared_in(span)
        pushes = [
            DanaPush(
                part.worker, self._own[part.worker].part(span), part.gradients.flats[region][cut], part.share
            )
            for part in parts
        ]
        before = now.clone() if self.watches else None
        self._weigh(change.leaving, -1.0, span)
        momentum.step(group, settings[group], now, shared, pushes, Extent(stride.scale, stride.factor))
        self._weigh(change.entering, 1.0, span)
        if before is not None:
            self._moved(before, weights, span)
        for target in targets:
            momentum.ahead(group, now, total, shared, target[region][cut])

    def hand_out(self, weights: Sequence[Tensor], target: Sequence[Tensor], lanes: Lanes) -> None:
        """Write the look-ahead to a worker's memory."""
        momentum = self._momentum
        assert momentum is not None
        self._settle(lanes)

        def write(span: Span) -> None:
            now, into = weights[span.region][span.part], target[span.region][span.part]
            momentum.ahead(span.group, now, self.total.part(span), self._shared_in(span), into)

        lanes.map(write, self._all)

    def forget(self, worker: int, lanes: Lanes) -> None:
        """A worker has left: its momentum is dropped, and the sum made anew, without what rounding left."""
        if self._momentum is None or worker not in self._own:
            return
        weights, own = self._weights_of([worker])[worker], self._own.pop(worker)
        self._last = [] if self._own else [(own, weights)]
        self._momentum.forget(worker)
        self._counted.discard(worker)
        lanes.map(self._add_up, self._all)

    def _add_up(self, span: Span) -> None:
        self.total.part(span).zero_()
        self._weigh(self._weights_of(self._counted), 1.0, span)

    def _settle(self, lanes: Lanes) -> None:
        """Somebody has fallen asleep or woken up without a step."""
        leaving = self._leaving(())
        entering = self._entering()
        if leaving or entering:
            lanes.map(lambda span: self._weigh(leaving, -1.0, span), self._all)
            lanes.map(lambda span: self._weigh(entering, 1.0, span), self._all)

    def _leaving(self, pushed: Collection[int]) -> Weights:
        """Whose momentum is to be taken out of the sum: it changes, or its worker does not compute."""
        out = {worker for worker in self._counted if worker in pushed or worker not in self._wanted}
        self._counted -= out
        return self._weights_of(out)

    def _entering(self) -> Weights:
        """Whose momentum is to be put into the sum."""
        into = self._wanted - self._counted
        self._counted |= into
        return self._weights_of(into)

    @property
    def _wanted(self) -> set[int]:
        return set(self._own) if self.awake is None else {each for each in self._own if each in self.awake}

    def _weights_of(self, workers: Collection[int]) -> Weights:
        momentum, groups = self._momentum, range(len(self._spec.groups))
        assert momentum is not None
        return {worker: [momentum.weight(worker, group) for group in groups] for worker in sorted(workers)}

    def _weigh(self, weights: Weights, sign: float, span: Span) -> None:
        """Add momenta to the sum, or take them out."""
        for worker, by_group in weights.items():
            self.total.part(span).add_(self._own[worker].part(span), alpha=sign * by_group[span.group])

    def _spans(self, missing: Collection[int]) -> list[Span]:
        return spans(self._layout, self._spec, missing) if missing else self._all

    def _shared_in(self, span: Span) -> dict[str, Tensor]:
        return {name: vectors.part(span) for name, vectors in self._shared.items()}

    # -- what scripts save and load -----------------------------------------------------------

    def plain(self) -> dict[str, Tensor]:
        """The optimizer's state as torch would have it, in whose place this steps."""
        weights = self._weights_of(self._own)
        return self._momenta().saved([(self._own[each], weights[each]) for each in self._own] or self._last)

    def load_plain(self, state: State, workers: Collection[int]) -> None:
        """Go on from a state of torch's, or begin anew if it is empty. `workers` are there."""
        for worker in set(self._own).difference(workers):
            del self._own[worker]
        owns = [self.own(worker) for worker in workers]
        self._momenta().load(state, owns, workers)
        self._last, self._counted = [], self._wanted
        for span in self._all:
            self._add_up(span)

    def _momenta(self) -> Momenta:
        assert self._momentum is not None
        return Momenta(self._spec, self._momentum, self._shared.get(SECOND))

    # -- checkpoints --------------------------------------------------------------------------

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of all of it, under names like those of an optimizer's state: by parameter."""
        vectors = {f"{MARK}{worker}": own for worker, own in self._own.items()}
        vectors |= {f"{MARK}{name}": shared for name, shared in self._shared.items()}
        tensors = {
            f"{number}.{name}": each.views[index].contiguous().clone()
            for number, index in enumerate(self._order)
            for name, each in vectors.items()
        }
        state: dict[str, Any] = {"correct": self.name, "counted": sorted(self._counted)}
        state |= {} if self._momentum is None else self._momentum.state()
        return tensors, {f"{number}.{MARK}": state for number in range(len(self._order))}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from what `export` gave, if it was of the same correction."""
        state = next((value for name, value in values.items() if _is_ours(name)), None)
        if state is None or state["correct"] != self.name:
            return
        if self._momentum is not None:
            self._momentum.load(state)
            self._counted = set(state["counted"])
        for name, tensor in tensors.items():
            number, _, key = name.partition(f".{MARK}")
            if _is_ours(name):
                vectors = self._shared[key] if key in self._shared else self.own(int(key))
                vectors.views[self._order[int(number)]].copy_(tensor)


def make_rule(named: Named) -> GradientRule | None:
    """What changes gradients."""
    match named.rule:
        case "gap":
            return GapAware(ahead=named.dana)
        case "dc":
            return DelayCompensation(named.strength or 0.0)
        case "dca":
            return AdaptiveDelayCompensation(named.strength or 0.0)
    return None


def make_momentum(spec: OptimizerSpec) -> Momentum:
    """DANA in place of this optimizer."""
    if spec.name in ADAMS:
        return DanaAdam(len(spec.groups), decoupled=spec.name == "AdamW")
    return DanaSGD(len(spec.groups))


def make_corrections(layout: Layout, spec: OptimizerSpec, name: str) -> Corrections | None:
    """What a run of this name corrects with."""
    return None if name == NONE else Corrections(layout, spec, name)


def memory_bytes(layout: Layout, spec: OptimizerSpec, name: str, workers: int) -> int:
    """What the corrections of so many workers take."""
    named = parse_correction(name)
    count = workers + 1 + len(make_momentum(spec).memory) if named.dana else 0
    rule = make_rule(named)
    return (count + (0 if rule is None else len(rule.memory))) * layout.gradient_bytes


def without_ours(named: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's own state among what a store has saved."""
    return {name: value for name, value in named.items() if not _is_ours(name)}


def corrected_by(values: Iterable[Any]) -> str:
    """Which correction a checkpoint's values are of."""
    found = (value["correct"] for value in values if isinstance(value, dict) and "correct" in value)
    return str(next(found, NONE))


def _is_ours(name: str) -> bool:
    return name.partition(".")[2].startswith(MARK)
