"""Cuts a model into the stages of a mesh, and gives every worker its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigError
from paceline.parallel.along import Along
from paceline.parallel.mesh import Mesh
from paceline.parallel.optimizers import check_known
from paceline.parallel.pace import MeshPace
from paceline.parallel.parts import CheckpointPart, import_optimizer, read_mesh_checkpoint
from paceline.parallel.pieces import in_order
from paceline.parallel.pipeline.blocks import (
    Cost,
    Row,
    as_blocks,
    check_apart,
    check_only_blocks,
    measure,
    stage_of,
)
from paceline.parallel.pipeline.computing import Computing, ahead_of
from paceline.parallel.pipeline.engine import Schedule
from paceline.parallel.pipeline.loading import Pairs, pair
from paceline.parallel.pipeline.partition import check_blocks, check_cuts, partition
from paceline.parallel.pipeline.plain import Whole, unsplit
from paceline.parallel.pipeline.worker import Pipeline
from paceline.parallel.rates import Deferred
from paceline.parallel.registry import PIPELINES, make_pipeline, parse_along
from paceline.parallel.same_data import check_same_data
from paceline.protocols.grid import Grid
from paceline.runtime.checkpoints.random_state import seed
from paceline.runtime.worker.pace import Pace
from paceline.store.disk.checkpoint import other_model
from paceline.store.optimizers import check_suited

DEFAULT = "layerwise"


def pipeline(
    pace: Pace,
    mesh: Grid,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    loader: Any,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    scheduler: LRScheduler | None = None,
    cuts: Sequence[int] | None = None,
) -> tuple[Pipeline | Whole, Any]:
    """Cut a model over the mesh's axis `stage`, and repeat it along `data`. All workers come here.

    `model` is an nn.Sequential, or a list of blocks. `cuts` says where stages 1, 2, ... begin; without it the
    cost of every block is measured, and the slowest stage made as fast as can be. What comes back is the
    pipeline (`pipe.step(x, y)` for every batch) and its loader. A mesh of one place trains the model whole.
    """
    if mesh.count == 1:
        if not isinstance(model, nn.Module):
            model = list(model)
        return unsplit(pace, model, optimizer, loader, loss, scheduler)
    if not isinstance(pace, MeshPace) or not isinstance(mesh, Mesh):
        raise ConfigError("a pipeline needs the mesh that pace.mesh() gives.")
    others = [axis for axis in mesh.axes if axis not in ("data", "stage")]
    if others:
        raise ConfigError(f"a pipeline has the axes data and stage, the mesh also {', '.join(others)}.")
    pace.refuse_after_step("in a pipeline every worker has its own stage. Train without an axis 'stage'.")
    return _cut(pace, mesh, as_blocks(model), optimizer, loader, loss, scheduler, cuts)


def _cut(
    pace: MeshPace,
    mesh: Mesh,
    blocks: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    loss: Callable[[Tensor, Tensor], Tensor],
    scheduler: LRScheduler | None,
    given: Sequence[int] | None,
) -> tuple[Pipeline, Pairs]:
    stages, index, config = mesh.size("stage"), mesh.index("stage"), pace.config
    name = pace.protocol if pace.protocol in PIPELINES else DEFAULT
    chosen = make_pipeline(name, pace.settings if name == pace.protocol else {})
    along = chosen.data
    if pace.protocol is not None and pace.protocol not in PIPELINES:  # a peer's: it is for the copies
        along = ":".join([pace.protocol, *(f"{key}={value}" for key, value in pace.settings.items())])
    schedule = chosen.schedule(stages)
    check_suited(optimizer)
    check_blocks(len(blocks), stages)
    check_only_blocks(blocks)
    check_known(optimizer, blocks)
    dealt = Pairs(loader, mesh.index("data"), mesh.size("data"), config.seed, loads=index == 0)
    dealt.say = pace.warn if pace.lead else dealt.say
    check_same_data(loader, mesh.count)
    pace.ready(blocks, dealt.per_epoch, len(dealt) * mesh.size("data"))
    cuts = _agreed_cuts(pace, blocks, loader, schedule, given, stages)
    check_apart(blocks, cuts)
    row = stage_of(blocks, cuts, index)
    checkpoint = None if config.resume is None else read_mesh_checkpoint(Path(config.resume))
    _narrow(optimizer, blocks, row)
    rates = Deferred(scheduler, optimizer, lambda: dealt.repeats)
    _equal_copies(mesh, row)
    last = index == stages - 1
    computing = Computing(row, index == 0, loss if last else None, optimizer)
    computing.ahead = ahead_of(schedule, index, optimizer)
    if checkpoint is not None:
        _restore(Path(config.resume or ""), checkpoint, row, optimizer)
    _apart_randomness(pace, mesh)
    copies = Along(
        parse_along(along)[1],
        mesh,
        list(row.named_parameters()),
        list(row.buffers()),
        optimizer,
        seed=config.seed,
        clip_norm=config.clip_norm,
        sent=lambda size: pace.sent("data", size),
    )
    pipe = Pipeline(pace, mesh, schedule, computing, copies, dealt, optimizer, rates, name)
    if config.checkpoint_every is not None and not pipe.resumable:
        raise ConfigError(
            f"--checkpoint-every keeps one copy, but under data={along} copies differ. Leave it out, or use "
            "data=allreduce."
        )
    if checkpoint is not None:
        pipe.resume(checkpoint.state)
    return pipe, dealt


# -- where to cut -----------------------------------------------------------------------------


def _agreed_cuts(
    pace: MeshPace,
    blocks: nn.Sequential,
    loader: Any,
    schedule: Schedule,
    given: Sequence[int] | None,
    stages: int,
) -> tuple[int, ...]:
    """Those of the script, or what the lead has measured."""
    if given is not None:
        return check_cuts(given, len(blocks), stages)
    told = torch.zeros(stages - 1, dtype=torch.int64)
    if pace.lead and stages > 1:
        costs = measure(blocks, _sample(loader))
        again = schedule.stored == "inputs" and any(schedule.delays.m)
        whole = [c.forward_s * (2 if again else 1) + c.backward_s for c in costs]
        cuts = partition(whole, stages)
        pace.print(_told(blocks, costs, cuts, schedule))
        told = torch.tensor(cuts)
    if stages > 1:
        dist.broadcast(told, 0)
    return tuple(told.tolist())


def _sample(loader: Any) -> Tensor:
    """A batch to measure with; the loader is left alone."""
    size = min(loader.batch_size or 32, len(loader.dataset))
    collate = loader.collate_fn
    x, _ = pair(collate([loader.dataset[i] for i in range(size)]))
    if not isinstance(x, Tensor):
        raise ConfigError(f"the first stage takes one tensor, but the loader gives a {type(x).__name__}.")
    return x


def _told(blocks: nn.Sequential, costs: list[Cost], cuts: Sequence[int], schedule: Schedule) -> str:
    """The partition for people: time per iteration and memory of every stage, as predicted."""
    bounds, lines, slowest = (0, *cuts, len(blocks)), [], 0.0
    for stage, (start, end) in enumerate(pairwise(bounds)):
        mine, delay = costs[start:end], schedule.delays.m[stage]
        again = schedule.stored == "inputs" and delay > 0
        seconds = sum(c.forward_s * (2 if again else 1) + c.backward_s for c in mine)
        slowest = max(slowest, seconds)
        weights = sum(c.weight_bytes for c in mine)
        copies = delay + 1 if schedule.weights == "stashed" and delay else 1
        inputs = mine[0].input_bytes * (delay + 1)
        graphs = sum(c.output_bytes for c in mine) * (delay + 1 if schedule.stored == "graph" else 1)
        memory = weights * (copies + 1) + inputs + graphs
        names = f"block {start}" if end == start + 1 else f"blocks {start} to {end - 1}"
        lines.append(f"stage {stage}: {names}, {seconds * 1e3:.2f} ms, about {memory / 1e6:.1f} MB")
    return "\n".join([f"cut by measured time, about {slowest * 1e3:.2f} ms per iteration:", *lines])


# -- every worker its own ---------------------------------------------------------------------


def _narrow(optimizer: torch.optim.Optimizer, blocks: nn.Sequential, row: Row) -> None:
    """Let the optimizer have this stage's parameters alone, and give back the memory of the others."""
    mine = {id(p) for p in row.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in mine]
    own = {id(module) for module in row.modules()}
    for name, block in in_order(blocks):
        if id(block) not in own:
            block.register_forward_pre_hook(_elsewhere(name))
            for p in block.parameters():
                p.data = torch.empty(0, dtype=p.dtype)


def _elsewhere(name: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise ConfigError(
            f"block {name!r} is on another stage: this worker cannot call the whole model. Use "
            "pipe.step(x, y) to train, and pace.evaluate(fn), which gives fn a model that is whole."
        )

    return refuse


def _equal_copies(mesh: Mesh, row: Row) -> None:
    """All copies begin as the first one."""
    if mesh.size("data") > 1:
        for tensor in (*row.parameters(), *row.buffers()):
            dist.broadcast(tensor.detach(), mesh.ranks("data")[0], group=mesh.group("data"))


def _apart_randomness(pace: MeshPace, mesh: Mesh) -> None:
    """From here on every worker draws random numbers (dropout) of its own; the first goes on as it was."""
    if pace.rank:
        torch.manual_seed(pace.config.seed + 7919 * pace.rank)
        seed(pace.config.seed + 7919 * pace.rank)


def _restore(folder: Path, saved: CheckpointPart, row: Row, optimizer: torch.optim.Optimizer) -> None:
    own = row.state_dict(keep_vars=True)
    if any(
        name not in saved.model or saved.model[name].shape != tensor.shape for name, tensor in own.items()
    ):
        raise other_model(folder)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved.model[name])
    import_optimizer(folder, saved, optimizer, row.named_parameters())
