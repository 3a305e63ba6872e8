"""A run on a mesh whose script has an ordinary loop: forward, backward, `optimizer.step()`.

Whatever splits the model works inside it (layers that exchange activations, a sequence that is switched,
tables that lie elsewhere) and has told the mesh so (`mesh.split`). Here is what all of them share: batches,
steps that keep copies in step along `data`, records, evaluation, and this worker's part of what is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigError
from paceline.parallel import messages as m
from paceline.parallel.along import Along, as_one
from paceline.parallel.loading import MeshLoader
from paceline.parallel.mesh import Mesh, mean_along
from paceline.parallel.optimizers import check_elementwise, check_known, refuse_scaler
from paceline.parallel.pace import MeshPace
from paceline.parallel.padding import Padding
from paceline.parallel.parts import (
    CheckpointPart,
    export_optimizer,
    import_optimizer,
    pieces_remembered,
    read_mesh_checkpoint,
)
from paceline.parallel.pieces import TensorPiece, pieces_of
from paceline.parallel.rates import Deferred
from paceline.parallel.registry import along_of
from paceline.parallel.rows import DealtRows
from paceline.parallel.same_data import check_same_data
from paceline.protocols.grid import Grid
from paceline.runtime.checkpoints.random_state import seed
from paceline.runtime.worker.data.partition import Partition
from paceline.runtime.worker.model.wrappers import refuse_sharded
from paceline.runtime.worker.optimizer.clipping import Watch
from paceline.runtime.worker.optimizer.replacing import replace_step
from paceline.runtime.worker.optimizer.scaling import welcome_scalers
from paceline.runtime.worker.writing import evaluation_wrote
from paceline.store.disk.checkpoint import other_model
from paceline.store.optimizers import check_suited
from paceline.store.together import Together


def prepare(
    pace: MeshPace, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Stepped, MeshLoader]:
    """Tie an ordinary loop to the mesh, and its loader. All workers come here."""
    mesh, config = pace.mesh(), pace.config
    _check_split(mesh)
    check_suited(optimizer)
    pieces = pieces_of(model)
    if pieces:
        axis = next(iter(pieces.values())).axis
        pace.refuse_after_step(
            f"along the mesh's axis {axis!r} every worker has pieces of it. Use another axis."
        )
    _check_optimizer(model, optimizer, pieces)
    if loader is None:
        raise ConfigError("a mesh distributes the batches: give pace.prepare() the training loader, too.")
    feeding = Feeding(mesh)
    if isinstance(getattr(loader, "dataset", None), Partition):
        dealt: MeshLoader = DealtRows(
            loader, feeding.copy, feeding.copies, config.seed, pace, mesh, feeding.axes
        )
    else:
        dealt = MeshLoader(loader, feeding.copy, feeding.copies, config.seed)
        check_same_data(loader, mesh.count)
    pace.ready(model, dealt.per_epoch, len(dealt) * feeding.copies, pieces)
    _equal_copies(mesh, model)
    if feeding.copy:  # those of a copy draw the same random numbers (dropout), other copies others
        torch.manual_seed(config.seed + 7919 * feeding.copy)
        seed(config.seed + 7919 * feeding.copy)
    for share in mesh.shares.values():
        share.begin()
    stepped = Stepped(pace, mesh, model, optimizer, dealt, feeding, pieces)
    dealt.about_to = stepped.begin
    dealt.say = pace.warn if pace.lead else dealt.say
    return stepped, dealt


class Feeding:
    """Along which axes workers have batches of their own, and where this worker stands on them."""

    def __init__(self, mesh: Mesh) -> None:
        self.apart = [share.axis for share in mesh.shares.values() if share.apart]
        axes = ["data", *self.apart]
        self.axes = {axis: mesh.size(axis) for axis in mesh.axes if axis in axes}
        self.copies = prod(self.axes.values())
        self.copy = Grid(self.axes).rank_at({axis: mesh.index(axis) for axis in self.axes})
        self.counts = all(mesh.index(axis) == 0 for axis in mesh.axes if axis not in self.axes)
        """Whether this worker counts its copy's samples."""


class Stepped:
    """One worker's loop."""

    def __init__(
        self,
        pace: MeshPace,
        mesh: Mesh,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: MeshLoader,
        feeding: Feeding,
        pieces: dict[str, TensorPiece],
    ) -> None:
        self._pace, self._mesh, self._model, self._optimizer = pace, mesh, model, optimizer
        self._loader, self._feeding, self._pieces = loader, feeding, pieces
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._watch = Watch([p for _, p in self._named])
        self._padding = Padding(pace.config, pace.rank)
        self._rates: Deferred | None = None
        self._samples = self._updates = self._kept_steps = 0
        self._done = loader.taken
        """What the loader had handed out by the last step."""
        self._position = (0, 0)
        """Epochs and rounds that are in the weights."""
        self._began, self._waited = time.perf_counter(), 0.0
        config = pace.config
        saved = None if config.resume is None else read_mesh_checkpoint(Path(config.resume))
        if saved is not None:
            self._restore(Path(config.resume or ""), saved)
        self._along = Along(
            along_of(pace.protocol, pace.settings, len(loader)),
            mesh,
            list(model.named_parameters()),
            list(model.buffers()),
            optimizer,
            seed=config.seed,
            clip_norm=config.clip_norm,
            sent=lambda size: pace.sent("data", size),
            norm=self._norm,
        )
        if config.checkpoint_every is not None and not self.resumable:
            raise ConfigError(
                "--checkpoint-every keeps one copy, but copies differ between two averagings. Leave it out, "
                "or keep them equal (allreduce)."
            )
        replace_step(optimizer, self.step)
        welcome_scalers(optimizer)  # who would call none of our steps else

    # -- training -----------------------------------------------------------------------------

    def begin(self) -> bool:
        """Before every batch. False: training was ended for all."""
        if self._loader.taken != self._done:  # gradients of several batches are added up
            return True
        going = self._pace.begin()
        self._began, self._waited = time.perf_counter(), self._mesh.waited_s
        return going

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """What `optimizer.step()` does: the gradients of all workers, one update."""
        refuse_scaler(self._optimizer)
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) does not work on a mesh. Compute the gradients first, and call "
                "optimizer.step() without a closure."
            )
        if self._updates & (self._updates + 1) == 0:  # in the first steps, and then more rarely
            refuse_sharded(self._model)
        before, self._done = self._done, self._loader.taken
        samples, of_all = self._done[0] - before[0], self._done[1] - before[1]
        if not of_all:
            raise ConfigError("optimizer.step() without a batch: take it from the loader that prepare gave.")
        self._mention_clipping()
        busy = self._padding.until(self._began + self._mesh.waited_s - self._waited, 1.0)
        for share in self._mesh.shares.values():
            share.combine(samples)
        together = samples
        for axis in self._feeding.apart:  # what is not split is one model for all who have batches
            together = mean_along(self._mesh, axis, [p for _, p in self._named], together)
        self._along.update(together)
        self._along.clip_norm = self._pace.config.clip_norm
        self._updates += 1
        self._samples += of_all
        self._loader.unused = 0
        self._position = (self._loader.epoch, self._loader.rounds)
        if self._rates is not None:
            self._rates.fed += 1
            self._rates.applied(1)
        counted = samples if self._feeding.counts else 0
        self._pace.did(m.Iteration(time.monotonic(), busy, self._updates, counted, 0))

    def schedule(self, scheduler: LRScheduler) -> None:
        """Let a scheduler that is stepped once per iteration stand where the run does."""
        if self._rates is not None:
            raise ConfigError("a mesh takes one scheduler. Chain several with torch's ChainedScheduler.")
        self._rates = Deferred(scheduler, self._optimizer, lambda: self.idle)
        self._rates.catch_up(self._kept_steps)

    def clip(self, max_norm: float) -> None:
        """Clip what the next step steps with."""
        self._along.clip_norm = max_norm

    def _mention_clipping(self) -> None:
        """Say once what becomes of gradients that the script changes by itself."""
        if self._watch.changed(False) and self._pace.lead:
            self._pace.warn(
                "the script changes gradients between backward and step. Every worker changes what it has of "
                "them: clip_grad_norm_ clips each by another norm, and workers of a split model then no "
                "longer agree. Write pace.clip_grad_norm_(max_norm); a constant factor is fine"
            )

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole model's gradient, if it is to be clipped: that of pieces lies on several workers."""
        if self._along.clip_norm is None or not self._pieces:
            return torch.nn.utils.get_total_norm(gradients)
        parts: dict[str, list[Tensor]] = {}
        for name, p in self._named:
            if p.grad is not None:
                parts.setdefault(self._pieces[name].axis if name in self._pieces else "", []).append(p.grad)
        total = torch.zeros((), dtype=torch.float64)
        for axis, found in sorted(parts.items()):
            square = torch.nn.utils.get_total_norm(found).double() ** 2
            if axis and self._mesh.size(axis) > 1:
                with self._mesh.exchange(axis, 2 * square.element_size()):
                    dist.all_reduce(square, group=self._mesh.group(axis))
            total += square
        return total.sqrt()

    # -- what any split model is asked --------------------------------------------------------

    def settle(self) -> None:
        """Nothing is under way between two steps, but for what a way of splitting has put off."""
        for share in self._mesh.shares.values():
            share.settle()

    def close(self) -> None:
        """There is nothing to let go of."""

    @property
    def idle(self) -> bool:
        """Whether a resumed script only repeats what was done before."""
        return self._loader.repeats

    @property
    def loader(self) -> MeshLoader:
        """What deals out its batches."""
        return self._loader

    @property
    def resumable(self) -> bool:
        """Where copies differ, a checkpoint of one of them is not enough."""
        return self._along.agrees

    def evaluate(self, measure: Callable[[nn.Module], dict[str, float]]) -> m.Measured | None:
        """All workers of the first copy compute; what the lead finds is what counts."""
        with as_one(self._model, self._along):
            if self._mesh.index("data"):
                return None
            began = time.perf_counter()
            copies = self._mesh.size("data") > 1
            before = [p.detach().clone() for p in self._model.parameters()] if copies else []
            values = measure(self._model)
            for (name, now), was in zip(self._model.named_parameters(), before, strict=False):
                if not torch.equal(now, was):  # the other copies have not heard of it
                    raise evaluation_wrote(self._pace.rank, name)
            measured = m.Measured(values, time.perf_counter() - began, self._updates, self._samples)
            return measured if self._pace.lead else None

    def part(self) -> CheckpointPart | None:
        """The first copy's pieces, each from who has it, and from the lead what all have."""
        with as_one(self._model, self._along):
            if self._mesh.index("data"):
                return None
            state = {name: t.detach().clone().contiguous() for name, t in self._model.state_dict().items()}
        kept, values = export_optimizer(self._optimizer, self._named)
        pieces = self._pieces | pieces_remembered(self._pieces, self._named, kept)
        if not self._pace.lead:
            state = {name: tensor for name, tensor in state.items() if name in pieces}
            kept = {name: tensor for name, tensor in kept.items() if name in pieces}
        return CheckpointPart(state, kept, values if self._pace.lead else {}, self._state(), pieces)

    def _state(self) -> m.MeshState:
        return m.MeshState(
            mesh=self._mesh.axes,
            protocol=self._pace.protocol or "mesh",
            passes=self._position[0],
            batches=self._position[1] * self._feeding.copies,
            updates=self._updates,
            samples=self._samples,
            stepped_by=type(self._optimizer).__name__,
            schedule_steps=0 if self._rates is None else self._rates.steps,
        )

    def _restore(self, folder: Path, saved: CheckpointPart) -> None:
        """Begin where a checkpoint was taken, with this mesh's pieces of it."""
        rounds, left = divmod(saved.state.batches, self._feeding.copies)
        if left and saved.state.mesh.get("data", 1) == self._mesh.size("data"):
            raise ConfigError(
                f"the checkpoint was taken after {saved.state.batches} batches of an epoch, which cannot be "
                f"dealt out to the {self._feeding.copies} workers of {self._mesh}. Resume with --mesh "
                f"{Grid(saved.state.mesh)}."
            )
        if saved.state.mesh.get("data", 1) != self._mesh.size("data"):
            raise ConfigError(
                f"the checkpoint is of {saved.state.mesh.get('data', 1)} copies, the mesh has "
                f"{self._mesh.size('data')}. Resume with as many; the sizes of other axes may differ."
            )
        found: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            whole, piece = saved.model.get(name), self._pieces.get(name)
            if whole is None or tuple(whole.shape) != (tensor.shape if piece is None else piece.shape):
                raise other_model(folder)
            found[name] = whole if piece is None else piece.of(whole)
        self._model.load_state_dict(found)  # a module may keep in another form what it saves
        import_optimizer(folder, saved, self._optimizer, self._named, self._pieces)
        self._updates, self._samples = saved.state.updates, saved.state.samples
        self._position, self._kept_steps = (saved.state.passes, rounds), saved.state.schedule_steps
        self._loader.resume(*self._position)


# -- what cannot work is refused before the first batch ---------------------------------------

SPLITTERS = {
    "model": "paceline.parallel.layers.parallelize(model, mesh)",
    "stage": "paceline.parallel.pipeline.pipeline(...) instead of pace.prepare()",
    "sequence": "paceline.parallel.sequence.parallelize(model, mesh)",
    "shard": "paceline.parallel.embedding.EmbeddingTables(mesh, tables)",
}


def _check_split(mesh: Mesh) -> None:
    """An axis along which nothing is split would only repeat the work."""
    for axis, size in mesh.axes.items():
        if axis != "data" and size > 1 and axis not in mesh.shares:
            raise ConfigError(
                f"the mesh has {axis}={size}, but nothing is split along it before pace.prepare(). Use "
                f"{SPLITTERS[axis]}, or leave the axis out of --mesh."
            )


def _check_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, pieces: dict[str, TensorPiece]
) -> None:
    if isinstance(optimizer, Together):
        raise ConfigError("a mesh takes one model and one optimizer. Give it groups of parameters instead.")
    check_known(optimizer, model)
    if any(name in pieces for name, p in model.named_parameters() if p.requires_grad):
        check_elementwise(optimizer)


def _equal_copies(mesh: Mesh, model: nn.Module) -> None:
    """All copies begin as the first one, and so do workers that have batches of their own."""
    for axis in (*(share.axis for share in mesh.shares.values() if share.apart), "data"):
        for tensor in (*model.parameters(), *model.buffers()) if mesh.size(axis) > 1 else ():
            dist.broadcast(tensor.detach(), mesh.ranks(axis)[0], group=mesh.group(axis))
