"""Ties a model to flat memory: parameters, gradients and buffers become views of it, in place.

The user's own objects stay what they are: `p.data`, `p.grad` and buffers are re-pointed, so that
optimizers, schedulers and scalers that hold references never notice. Backward then accumulates
straight into shared memory, and a push copies nothing.

Views are lost when somebody replaces them (`model.zero_grad()`, `p.data = ...`, `self.mean = ...` for a
buffer): every push looks for that, copies what is needed and binds again. A parameter that took no
part in backward is told by the version counter of its gradient, which flat zeroing does not raise
and which clipping raises less than it raises the others'. Where nothing but backward raised it, a gradient
of zeros counts as one, as it does alone.

On another device than the CPU, the model is tied to flat memory there, and the shared memory is
its (pinned) staging area: one copy each way per iteration, unless workers exchange vectors from where
the model lies (`stay_near`). That path is not tested on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from paceline.errors import ConfigError
from paceline.fabric.gpu import page_lock
from paceline.fabric.private_view import PrivateView
from paceline.fabric.segment import Segment
from paceline.runtime.worker.model.device import one_device, synchronize
from paceline.runtime.worker.optimizer.scaling import Scaled
from paceline.store.layout import buffer_homes, describe, named_buffers, named_parameters
from paceline.store.together import parts_of

FIRST_LOOKS, EVERY_LOOKS = 16, 32
"""Where writes are not told, weights are compared at the first steps and then every so many."""
ROUNDINGS, COARSE_ROUNDINGS = 16, 2
"""How many units in the last place of the largest weight of its type count as rounding: for 32 bits and more,
and for fewer, where 16 of them would be an eighth of the largest bfloat16."""


class Binding:
    """One model, tied to a segment and weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not trained:
            raise ConfigError("the optimizer has no parameter that requires a gradient: nothing to train.")
        self.layout = describe(model, trained)
        named = named_parameters(model, trained)
        self._parameters = [named[slot.name] for slot in self.layout.parameters]
        self.trained = [named[slot.name] for slot in self.layout.trained]
        buffers = named_buffers(model)
        self._buffers = [buffers[slot.name] for slot in self.layout.buffers]
        homes = buffer_homes(model)
        self._homes = [homes.get(slot.name) for slot in self.layout.buffers]
        self.index = {id(p): i for i, p in enumerate(self.trained)}
        self._shares = [
            sorted(self.index[id(p)] for g in part.param_groups for p in g["params"] if id(p) in self.index)
            for part in parts_of(optimizer)
        ]
        """The trained parameters of each of several optimizers."""
        self._chosen = self._shares[0]
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._device = one_device([*self._parameters, *self._buffers])
        self._staged = self._device.type != "cpu"
        self.unlocked = ""
        """Why memory for copies to the device is not page-locked; empty: it is, or there is none."""
        self._frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
        self._present: set[int] = set()
        self._segment: Segment | None = None
        self._weights: Segment | None = None
        self._private: PrivateView | None = None
        """How the weights are seen here, where only others write to them."""
        self._seen_pages: tuple[list[tuple[int, int]] | None, bool] = None, False
        """Where something was written there, and whether that is known since weights came last."""
        self._looks = 0

    def initial(self) -> Segment:
        """The model's values as they are now, to begin the run with."""
        layout = self.layout
        memory = Segment.create(layout.weights_bytes + layout.segment_bytes, "initial weights")
        targets = layout.weight_views(memory.bytes)
        targets += layout.buffer_views(memory.bytes[layout.weights_bytes :])
        for target, source in zip(targets, [*self._parameters, *self._buffers], strict=True):
            target.copy_(source.detach())
        return memory

    def attach(self, segment: Segment, weights: Segment, own: bool = False, private: bool = False) -> None:
        """Re-point everything. What the memory holds becomes the model's values.

        `own`: weights and gradients get memory of their own, so that a step here does not change what the
        store has handed out; `bring` puts into the segment what the store is to have. `private`: what a
        script writes to weights stays here, until it is undone."""
        self._segment, self._weights, self._own = segment, weights, own
        self._near_segment = self._stage(segment)
        self._near_weights = self._stage(weights)
        self._near_gradients = self._near_segment
        if own:
            self.require_cpu(
                "steps of a worker's own (--apply increments) are for models on the CPU, so far."
            )
            self._near_weights = weights.bytes.clone()
            self._near_gradients = torch.zeros_like(segment.bytes)
        elif private and not self._staged:
            self._private = PrivateView(weights)
            self._near_weights = self._private.bytes
        self._weight_views = self.layout.weight_views(self._near_weights)
        self._gradients = self.layout.gradient_views(self._near_gradients)
        self._quiet = self.layout.gradient_views(self._near_gradients)
        """The same once more: what is written here is not counted as a new gradient."""
        self._seen = [0] * len(self._gradients)
        self._places = [view.data_ptr() for view in self._quiet]
        self._flats = [region.flat(self._near_gradients, region.gradients) for region in self.layout.regions]
        self._bind_weights()
        for parameter, view in zip(self.trained, self._gradients, strict=True):
            parameter.grad = view
        self._buffer_views = self.layout.buffer_views(self._near_segment)
        for buffer, view in zip(self._buffers, self._buffer_views, strict=True):
            buffer.data = view
        self._written = [p._version for p in self._parameters]
        """How often torch has counted a write to each; new weights from elsewhere are none."""
        self.fresh()

    @property
    def attached(self) -> bool:
        """Whether the model is tied already."""
        return self._segment is not None

    def stay_near(self) -> tuple[Tensor, Tensor]:
        """Stage nothing from now on. The memory that the model is tied to: segment, and weights."""
        self._staged = False
        return self._near_segment, self._near_weights

    def hand_back(self) -> None:
        """Let the shared memory hold what the model does now; on the CPU it is the model's own."""
        assert self._segment is not None
        assert self._weights is not None
        if self._device.type != "cpu":
            self._segment.bytes.copy_(self._near_segment)
            self._weights.bytes.copy_(self._near_weights)

    def settle(self, sealed: bool) -> None:
        """What the shared memory holds is the model's, for good; a copy of it where that is `sealed`."""
        assert self._segment is not None
        assert self._weights is not None
        if self._device.type == "cpu":
            self._near_weights = self._weights.bytes.clone() if sealed else self._weights.bytes
            self._weight_views = self.layout.weight_views(self._near_weights)
        else:
            self._near_weights.copy_(self._weights.bytes)
            self._near_segment.copy_(self._segment.bytes)
        self._bind_weights()

    def part(self) -> None:
        """Go on with a copy of the weights, which others may change from now on."""
        self._near_weights = self._near_weights.clone()
        self._weight_views = self.layout.weight_views(self._near_weights)
        self._bind_weights()

    @property
    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The trained parameters, each with the view that its gradient accumulates in."""
        return list(zip(self.trained, self._gradients, strict=True))

    def collect(
        self, scaled: Scaled | None = None, backwards: Mapping[int, int] | None = None
    ) -> tuple[int, ...]:
        """Make sure that all gradients are in the segment, unscaled; which parameters have none.

        `backwards`: how often backward was seen to reach some of the parameters, by their identity."""
        if any(p.requires_grad for p in self._frozen):
            raise ConfigError(
                "a parameter that was frozen when the model was prepared requires a gradient now. Prepare it "
                "unfrozen: as long as it has no gradient it is not moved, and not decayed."
            )
        trained, views, seen = self.trained, self._gradients, self._seen
        rose = [views[i]._version - seen[i] for i in self._chosen]
        self._reclaim(self._chosen)
        bound = [trained[i].grad is views[i] for i in self._chosen]
        if min(rose) == max(rose) > 0 and all(bound):  # as after any backward pass
            self._present.update(self._chosen)
        else:
            self._collect_each(rose, backwards or {})
        self._set_others_aside()
        if scaled is not None:
            scaled.unscale(self._flats)
        if self._staged:
            self._to_host()
        if len(self._present) == len(self._chosen) == len(self.trained):
            return ()
        there = self._present.intersection(self._chosen)
        return tuple(i for i in range(len(self.trained)) if i not in there)

    def _reclaim(self, share: list[int]) -> None:
        """Have gradients back in the segment that a conversion of the model (`model.to(...)`) has moved."""
        moved = [i for i in share if self._gradients[i].data_ptr() != self._places[i]]
        if not moved:
            return
        anew = self.layout.gradient_views(self._near_gradients)
        for i in moved:
            was, parameter = self._gradients[i], self.trained[i]
            _check_alike(f"the gradient of {self.layout.trained[i].name!r}", was, anew[i])
            self._quiet[i].copy_(was)
            self._gradients[i], self._seen[i] = anew[i], 0
            if parameter.grad is was:
                parameter.grad = anew[i]

    def _collect_each(self, rose: list[int], backwards: Mapping[int, int]) -> None:
        """Some have no gradient, or one that lies elsewhere. `rose`: how often each was written to."""
        watched = [(backwards.get(id(self.trained[i])), n) for i, n in zip(self._chosen, rose, strict=True)]
        told = [counted == times for counted, times in watched if counted is not None]
        most = 1 if told and all(told) else max(rose)  # one is enough where nobody but backward wrote
        for i, times in zip(self._chosen, rose, strict=True):
            parameter, view = self.trained[i], self._gradients[i]
            gradient = parameter.grad
            if gradient is view:
                if times >= most > 0 or (times and bool(view.any())):
                    self._present.add(i)
                continue
            if gradient is None:
                view.zero_()
                self._present.discard(i)
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                self._present.add(i)
            parameter.grad = view

    def choose(self, which: int) -> None:
        """From now on it is about the gradients of this one of several optimizers."""
        self._chosen = self._shares[which]

    def _set_others_aside(self) -> None:
        """What other optimizers will step with takes no part now, and is there again afterwards."""
        if len(self._chosen) == len(self._quiet):
            return
        chosen = set(self._chosen)
        others = [view for i, view in enumerate(self._quiet) if i not in chosen]
        self._aside = [(view, view.clone()) for view in others]
        for view in others:
            view.zero_()

    def show_gradients(self, views: list[Tensor] | None, missing: frozenset[int] = frozenset()) -> None:
        """Let parameters have these gradients; None: those of the segment."""
        views = self._gradients if views is None else views
        for i in self._chosen:
            self.trained[i].grad = None if i in missing else views[i]

    def finite(self) -> bool:
        """Whether all gradients in the segment are finite; False also when it takes a closer look to tell."""
        return all(math.isfinite(_sum(flat)) for flat in self._flats)

    def bad_parameter(self) -> str | None:
        """The first parameter whose gradient in the segment is not finite."""
        named = zip(self.layout.trained, self._gradients, strict=True)
        return next((slot.name for slot, view in named if not bool(torch.isfinite(view).all())), None)

    @property
    def flats(self) -> list[Tensor]:
        """All gradients, as flat vectors. What is written here does not count as a new gradient."""
        return self._flats

    def show(self) -> None:
        """What was written there is what others are to see."""
        if self._staged:
            self._to_host()

    def require_cpu(self, why: str) -> None:
        """Refuse a model that does not lie in main memory."""
        if self._device.type != "cpu":
            raise ConfigError(f"the model is on {self._device}; {why}")

    def bring(self, stepped: bool) -> bool:
        """Put into the segment what the store is to have: the weights as stepped here, or the gradients that
        it is to see cannot be used. Whether all of it is surely finite."""
        assert self._segment is not None
        for region, gradients in zip(self.layout.regions, self._flats, strict=True):
            weights = region.flat(self._near_weights, region.weights)
            region.flat(self._segment.bytes, region.gradients).copy_(weights if stepped else gradients)
        self._written = [p._version for p in self._parameters]
        return stepped and all(
            math.isfinite(_sum(region.flat(self._near_weights, region.weights)))
            for region in self.layout.regions
        )

    def overwritten(self) -> tuple[str, bool] | None:
        """A parameter that is not what was handed out, and whether it is trained; None: all are.

        What was written and put back counts as handed out, but for rounding. The view of a store's weights
        tells every write. Elsewhere torch's counters tell most, and now and then everything is compared."""
        assert self._weights is not None
        run = self._weights.bytes
        for i in self._suspects():
            slot, now = self.layout.parameters[i], self._parameters[i].detach()
            handed = slot.view(run, slot.offset)
            if _equal(now, handed):
                continue
            if not _equal(now, handed, _rounding(handed, self.layout.weight_views(run))):
                return slot.name, slot.gradient is not None
        return None

    def differing(self, trained: Sequence[Tensor]) -> str | None:
        """A trained parameter that does not hold what these vectors do, one per region; None: all do."""
        self.adopt_weights()
        for region, values in zip(self.layout.regions, trained, strict=True):
            now = region.flat(self._near_weights, region.weights)
            least = 0.0 if torch.equal(now, values) else _rounding(values, [values])
            for slot in self.layout.trained:
                first = (slot.offset - region.weights) // region.item_bytes
                its = slice(first, first + slot.size_bytes // region.item_bytes)
                if slot.dtype == region.dtype and not _equal(now[its], values[its], least):
                    return slot.name
        return None

    def _suspects(self) -> list[int]:
        """Parameters that may have been written to since weights came last, or since this was asked."""
        slots, everything = self.layout.parameters, range(len(self._parameters))
        before, self._written = self._written, [p._version for p in self._parameters]
        self._looks += 1
        pages = None
        if self._private is not None:
            pages = self._private.written()
            self._seen_pages = pages, True
        if pages is None and (self._looks <= FIRST_LOOKS or self._looks % EVERY_LOOKS == 0):
            return list(everything)
        if pages == [] and not self._displaced():
            return []  # as nearly always
        moved = [_moved(p, view) for p, view in zip(self._parameters, self._weight_views, strict=True)]
        if pages is None:
            return [i for i in everything if moved[i] or before[i] != self._written[i]]
        return [i for i in everything if moved[i] or _touched(slots[i].offset, self._weight_views[i], pages)]

    def rewrite(self, write: Callable[[], None]) -> str | None:
        """New weights have arrived to be written to, and others will have what comes of it. The name of a
        parameter that is not trained and was written to all the same."""
        assert self._weights is not None
        self.pull()
        write()
        self.adopt_weights()
        run, own = self._weights.bytes, zip(self.layout.parameters, self._parameters, strict=True)
        still = ((s, p.detach()) for s, p in own if s.gradient is None)
        wrong = next((s.name for s, p in still if not _equal(p, s.view(run, s.offset))), None)
        if self._near_weights is not run:
            run.copy_(self._near_weights)
        self.pull()
        self._written = [p._version for p in self._parameters]
        return wrong

    def stranger(self, model: nn.Module) -> str | None:
        """A parameter of the model that is none of those that it was tied with; None: all are."""
        known = {id(tensor) for tensor in [*self._parameters, *self._buffers]}
        return next((name for name, p in model.named_parameters() if id(p) not in known), None)

    def adopt_weights(self) -> None:
        """Take over what somebody has put in the place of parameters (`p.data = ...`)."""
        named = zip(self.layout.parameters, self._parameters, self._weight_views, strict=True)
        for slot, parameter, view in named if self._displaced() else ():
            if _moved(parameter, view):
                _check_alike(f"parameter {slot.name!r}", parameter, view)
                view.copy_(parameter.data)
                parameter.data = view

    def adopt_buffers(self) -> None:
        """Take over what the script has put in the place of buffers (`self.mean = ...`)."""
        for i, (home, view) in enumerate(zip(self._homes, self._buffer_views, strict=True)):
            now = self._buffers[i] if home is None else home[0].get(home[1])
            if now is None or _moved(now, view):
                now = _check_alike(f"buffer {self.layout.buffers[i].name!r}", now, view)
                view.copy_(now.detach())
                self._buffers[i].data = view
                if home is not None:  # the other tensor stays the script's own
                    home[0][home[1]] = self._buffers[i]

    def pull(self) -> None:
        """New weights have arrived."""
        if self._private is not None:
            pages, looked = self._seen_pages
            self._private.undo(pages if looked else self._private.written())
            self._seen_pages = None, False
        elif self._staged:
            self._from_host()
        elif self._own and self._weights is not None:
            self._near_weights.copy_(self._weights.bytes)
        if self._displaced():
            self._bind_weights()

    def outdate(self, share: list[int] | None = None) -> None:
        """The weights of these trained parameters (None: of all) are others now. As after a plain step, torch
        is to refuse gradients of what was computed before; what the script wrote is told all the same."""
        before = [p._version for p in self._parameters]
        increment_version(self.trained if share is None else [self.trained[i] for i in share])
        now = zip(self._written, self._parameters, before, strict=True)
        self._written = [told + p._version - then for told, p, then in now]

    def fresh(self) -> None:
        """New weights have arrived, and gradients begin anew."""
        self.pull()
        self.outdate(self._chosen)
        for view, kept in self._aside:
            view.copy_(kept)
        self._aside = []
        for i in self._chosen:
            self._seen[i] = self._gradients[i]._version

    @property
    def writes(self) -> int:
        """How often gradients were written to since their last step, or since they were cleared."""
        named = zip(self.trained, self._gradients, self._seen, strict=True)
        return sum(
            view._version - seen if p.grad is view else 0 if p.grad is None else 1 + p.grad._version
            for p, view, seen in named
        )

    def zero(self, set_to_none: bool, which: int = 0) -> None:
        """Zero an optimizer's gradients. Unless they become None, they take part in its next step."""
        share = self._shares[which]
        self._reclaim(share)
        if set_to_none:
            self._present.difference_update(share)
        for memory in self._flats if len(self._shares) == 1 else [self._quiet[i] for i in share]:
            memory.zero_()
        for i in share:
            self.trained[i].grad = self._gradients[i]
            self._seen[i] = self._gradients[i]._version

    def _bind_weights(self) -> None:
        for parameter, view in zip(self._parameters, self._weight_views, strict=True):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in self._weight_views]

    def _displaced(self) -> bool:
        """Whether a parameter lies elsewhere than its view."""
        return [p.data_ptr() for p in self._parameters] != self._addresses

    def _stage(self, segment: Segment) -> Tensor:
        if self._device.type == "cpu":
            return segment.bytes
        if self._device.type == "cuda":
            self.unlocked = page_lock(segment) or self.unlocked
        return segment.bytes.to(self._device)

    def _to_host(self) -> None:
        assert self._segment is not None
        self._segment.bytes.copy_(self._near_segment, non_blocking=True)
        synchronize(self._device)

    def _from_host(self) -> None:
        assert self._weights is not None
        self._near_weights.copy_(self._weights.bytes, non_blocking=True)
        synchronize(self._device)


def _touched(offset: int, view: Tensor, pages: list[tuple[int, int]]) -> bool:
    """Whether some of it lies in one of these stretches."""
    stop = offset + view.numel() * view.element_size()
    return any(begin < stop and offset < end for begin, end in pages)


def _rounding(handed: Tensor, weights: list[Tensor]) -> float:
    """What is left at most when something is added to this one and taken away again: perturbations are about
    as large as the weights of the model."""
    if not handed.is_floating_point():
        return 0.0
    kind = torch.finfo(handed.dtype)
    units = ROUNDINGS if kind.bits >= 32 else COARSE_ROUNDINGS
    alike = (view for view in weights if view.dtype == handed.dtype and view.numel())
    return units * kind.eps * max((float(view.abs().max()) for view in alike), default=0.0)


def _equal(now: Tensor, handed: Tensor, least: float = 0.0) -> bool:
    """Whether it has the same values, but for differences up to the `least` that count."""
    if (now.shape, now.dtype) != (handed.shape, handed.dtype):
        return False
    now = now.to(handed.device)
    if torch.equal(now, handed):
        return True
    same = (now == handed) | (now.isnan() & handed.isnan())
    return bool((same | ((now - handed).abs() <= least) if least > 0 else same).all())


def _sum(flat: Tensor) -> float:
    """Not finite if some element is not: the cheapest way to see that. 16-bit numbers overflow easily."""
    wide = flat.dtype in (torch.float32, torch.float64)
    return float(flat.sum() if wide else torch.linalg.vector_norm(flat))


def _moved(tensor: Tensor, view: Tensor) -> bool:
    """Whether it lies elsewhere."""
    return tensor.data_ptr() != view.data_ptr()


def _check_alike(what: str, now: Tensor | None, view: Tensor) -> Tensor:
    """Refuse a tensor that does not fit where another was when the model was prepared."""
    if now is not None and now.device != view.device:
        raise ConfigError(
            f"{what} was on {view.device} when the model was prepared, and is on {now.device} now. Move the "
            "model before prepare: model.to(device), the optimizer, then pace.prepare."
        )
    if now is None or (now.shape, now.dtype) != (view.shape, view.dtype):
        kind = "nothing" if now is None else f"{now.dtype} {tuple(now.shape)}"
        raise ConfigError(
            f"{what} was {view.dtype} {tuple(view.shape)} when the model was prepared, and is {kind} now. "
            "Convert the model before prepare, and let it keep types and shapes."
        )
    return now
