"""What a script holds in a run on a mesh: its place on the grid, and what all runs offer.

How the model is split is not known here: whatever splits it (a *split*, such as a pipeline) registers itself
and is asked to come to rest, to evaluate, and for its part of what is saved.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.config import RunConfig
from paceline.decoding import decode_message
from paceline.errors import ConfigError, RunError, RunStopped
from paceline.fabric.channel import Channel
from paceline.parallel import messages as m
from paceline.parallel.loading import MeshLoader
from paceline.parallel.mesh import Mesh, connect, gather_bytes
from paceline.parallel.parts import PARTS, CheckpointPart, write_part
from paceline.parallel.pieces import TensorPiece
from paceline.parallel.signs import Action, Signs
from paceline.parallel.torn import is_torn
from paceline.protocols.grid import Grid, check_axes
from paceline.runtime.messages.workers import Failed, Hello
from paceline.runtime.worker.pace import Metrics, Pace
from paceline.store.disk.checkpoint import make_room_for

TELL_S = 0.1
"""How often a worker tells what it did."""
WHY_S = 30.0
"""How long a worker whose exchange broke off waits to hear why: the conductor decides within a second."""


class Split(Protocol):
    """What splits a model over the mesh."""

    def settle(self) -> None:
        """Bring to an end what is under way; all workers do."""

    def evaluate(self, measure: Callable[[nn.Module], dict[str, float]]) -> m.Measured | None:
        """Have the lead call `measure` with the whole model; all workers come here. None elsewhere."""

    def part(self) -> CheckpointPart | None:
        """This worker's part of what is saved; None: others have all of it."""

    def close(self) -> None:
        """Let go of the ways to other workers; all workers do."""

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint has all that a run needs to go on."""

    @property
    def idle(self) -> bool:
        """Whether a resumed script only repeats what was done before."""

    @property
    def loader(self) -> MeshLoader:
        """What deals out its batches."""


class OrdinaryLoop(Split, Protocol):
    """What splits a model whose script has an ordinary loop."""

    def schedule(self, scheduler: LRScheduler) -> None:
        """Let a scheduler that is stepped once per iteration stand where the run does."""

    def clip(self, max_norm: float) -> None:
        """Clip what the next step steps with."""


Ordinary = Callable[["MeshPace", nn.Module, torch.optim.Optimizer, Any], tuple[OrdinaryLoop, Any]]
"""Ties an ordinary loop to the mesh; what it gives is attached, and the loader."""


class MeshPace(Pace):
    """One worker of a mesh."""

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        channel: Channel,
        protocol: str | None,
        settings: dict[str, Any],
        ordinary: Ordinary,
        chosen: object | None = None,
    ) -> None:
        """`chosen`: the object of a protocol that splits the model."""
        super().__init__(rank, config.workers)
        assert config.mesh is not None
        self._ordinary, self._chosen = ordinary, chosen
        self._loop: OrdinaryLoop | None = None
        self.config, self.protocol, self.settings = config, protocol, settings
        self._channel = channel
        self._answers: queue.SimpleQueue[m.ToWorker] = queue.SimpleQueue()
        channel.send(Hello(os.getpid(), protocol, settings, rank))
        received = channel.receive(m.worker_decoder)
        if received is None:
            raise RunStopped("the run is over already.")
        self._meeting, board = received[1]
        self._signs = Signs.of(board, config.workers)
        self._mesh: Mesh | None = None
        self._split: Split | None = None
        self._begun = 0
        self._done: list[m.Iteration] = []
        self._sent: dict[str, int] = {}
        self._told_at = 0.0
        self._withheld: BaseException | None = None
        """An exchange that broke off: it is shown if the conductor knows of nothing that explains it."""
        threading.Thread(target=self._listen, name="paceline-conductor", daemon=True).start()

    # -- the mesh -----------------------------------------------------------------------------

    def mesh(self, **axes: int) -> Mesh:
        """The grid that the workers form. All workers come here; the first call connects them."""
        given = self.config.mesh
        assert given is not None
        if axes:
            check_axes(axes)
        if axes and axes != given and self.lead and self._mesh is None:
            self.warn(f"--mesh {Grid(given)} is used, not the script's own {Grid(axes)}")
        if self._mesh is None:
            self._mesh = connect(given, self.rank, self._meeting)
            self._mesh.sent = self.sent
            self._mesh.chosen = self._chosen
        return self._mesh

    def attach(self, split: Split) -> None:
        """Whatever splits the model says so, once."""
        if self._split is not None:
            raise ConfigError("the model is already split. Split it once, with all of its parts.")
        self._split = split

    def ready(
        self,
        model: nn.Module,
        samples: int | None,
        batches: int | None,
        pieces: Mapping[str, TensorPiece] | None = None,
    ) -> None:
        """The lead has the model: whole, or with `pieces` of these parameters."""
        whole = {name: p.shape for name, p in model.named_parameters()}
        whole |= {name: torch.Size(piece.shape) for name, piece in (pieces or {}).items() if name in whole}
        sizes = {name: p.element_size() for name, p in model.named_parameters()}
        size = sum(whole[name].numel() * sizes[name] for name in whole)
        if self.lead:
            shares = () if self._mesh is None else self._mesh.shares.values()
            more = [share.left_out() for share in shares]
            numbers = sum(shape.numel() for shape in whole.values()) + sum(each[0] for each in more)
            size += sum(each[1] for each in more)
            self._channel.send(m.LeadReady(numbers, size, samples, batches))

    # -- one iteration ------------------------------------------------------------------------

    def begin(self) -> bool:
        """Before every iteration; all workers do equally many. False: training was ended for all."""
        assert self._split is not None
        self._begun += 1
        action = self._signs.begin(self.rank, self._begun)
        if action is Action.NONE:
            return True
        if action is Action.END:
            self._stopped = True
            return False
        self._split.settle()
        if action is Action.STOP:
            raise RunStopped("interrupted")
        self._save()
        return True

    def did(self, iteration: m.Iteration) -> None:
        """An iteration is complete."""
        self._done.append(iteration)
        if time.monotonic() - self._told_at > TELL_S:
            self.tell()

    def sent(self, axis: str, size_bytes: int) -> None:
        """Bytes went along an axis."""
        self._sent[axis] = self._sent.get(axis, 0) + size_bytes

    def tell(self) -> None:
        """Tell the conductor what was done since the last time."""
        values = self._reported() or {}
        shares = () if self._mesh is None else self._mesh.shares.values()
        lookups = next(filter(None, (share.lookups() for share in shares)), None)
        if self._done or self._sent or values or lookups:
            self._channel.send(m.Did(tuple(self._done), self._sent, values, lookups))
        self._done, self._sent, self._told_at = [], {}, time.monotonic()

    def _save(self) -> None:
        """Write this worker's part of a checkpoint, and wait until all have."""
        assert self._split is not None
        part = self._split.part()
        self.tell()
        if part is not None:
            self._write(part)
        state = part.state if part is not None else None
        self._channel.send(m.PartSaved(state.updates if state else 0, state.samples if state else 0))
        self._answers.get()

    # -- evaluation ---------------------------------------------------------------------------

    def evaluate(self, fn: Callable[..., Metrics]) -> Mapping[str, float] | None:
        """Have the lead call `fn` with the whole model, whose parts the other workers compute.

        All workers have to call it: what was under way is brought to an end first. All get the figures, so
        that they can do the same with them: lower a learning rate, or end.
        """
        if self._split is None:
            raise ConfigError(
                "pace.evaluate() was called before the model was split: there is nothing to evaluate."
            )
        if self._split.idle or self._left:
            return None
        self._split.settle()
        self.tell()

        def measure(model: nn.Module) -> dict[str, float]:
            self._model, self._models = model, [model]
            return self._measure(fn)

        measured = self._split.evaluate(measure)
        if measured is not None:
            self._channel.send(measured)
        values = {} if measured is None else measured.values
        told, *_ = gather_bytes(msgspec.msgpack.encode(values), self.size)  # the lead's
        found: dict[str, float] = decode_message(told, kind=dict[str, float])
        return found

    # -- the end ------------------------------------------------------------------------------

    def end(self, error: BaseException | None, text: str) -> None:
        """The script is over: save, and say so; or say what went wrong."""
        with contextlib.suppress(OSError):
            self._end(error, text)

    def _end(self, error: BaseException | None, text: str) -> None:
        if error is not None and not isinstance(error, RunStopped):
            kind = "config" if isinstance(error, ConfigError) else "error"
            if self._withheld is error:
                self._hear_why(text)
            else:
                self._channel.send(Failed(kind, text))  # type: ignore[arg-type]
            return
        try:
            self._finish(stopped=error is not None)
        except Exception as failure:
            if self.withholds(failure):
                self._hear_why(str(failure))
                os._exit(1)
            self._channel.send(Failed("error", str(failure)))
            raise

    def withholds(self, error: BaseException) -> bool:
        """Whether an exchange broke off: another worker's loss is what is to be read then, not this."""
        torn = isinstance(error, RuntimeError) and not isinstance(error, RunError) and is_torn(str(error))
        self._withheld = error if torn else None
        return torn

    def _hear_why(self, text: str) -> None:
        """Say that an exchange broke off, and show where, if nobody has anything better to say."""
        with contextlib.suppress(OSError):  # a conductor that is gone is noticed by who listens
            self._channel.send(m.ExchangeTorn(text))
        blamed = self._blamed()
        if blamed in (self.rank, None) and self._withheld is not None:
            traceback.print_exception(self._withheld)
        if blamed is None:
            print(
                f"error: rank {self.rank}: an exchange failed, and the run has not reported a reason within "
                f"{WHY_S:g} s. The failed exchange is above; see also the logs of the other ranks.",
                file=sys.stderr,
            )
        sys.stdout.flush()

    def _blamed(self) -> int | None:
        """The rank that the run's end is put down to; None if the conductor does not say."""
        until = time.monotonic() + WHY_S
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                if isinstance(answer, m.EndRun):
                    return answer.blamed
        return None

    def _write(self, part: CheckpointPart) -> None:
        run = self.config.path
        make_room_for(lambda: write_part(run / PARTS, self.rank, part), run, self.warn)

    def _finish(self, stopped: bool) -> None:
        if self._split is None:
            raise RunError("the script ended without splitting its model: nothing was trained.")
        self._split.settle()
        part = self._split.part()
        self.tell()
        if part is not None:
            self._write(part)
        self._split.close()
        torch.distributed.barrier()  # who leaves first would break off what others still wait for
        loader = self._split.loader
        self._channel.send(m.Bye(stopped, self._split.resumable, loader.told_passes(), loader.due))
        torch.distributed.destroy_process_group()

    def _listen(self) -> None:
        """Hear the conductor, whatever this worker waits for meanwhile."""
        while True:
            try:
                received = self._channel.receive(m.worker_decoder)
            except OSError:
                self._answers.put(m.EndRun(self.rank))
                return
            answer = m.EndRun(self.rank) if received is None else received[0]
            if isinstance(answer, m.EndRun) and self._withheld is None:
                os._exit(1)
            self._answers.put(answer)
            if isinstance(answer, m.EndRun):
                return

    def _leave(self) -> None:
        raise ConfigError(
            "pace.leave() does not work on a mesh: the other workers cannot continue without this one's part."
        )

    # -- what others do -----------------------------------------------------------------------

    def refuse_after_step(self, why: str) -> None:
        """No worker has a model that the script's functions could run on."""
        self._after_step.refuse(why)

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        self._loop, prepared = self._ordinary(self, model, optimizer, loader)
        self.attach(self._loop)
        return prepared

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        assert self._loop is not None
        self._loop.schedule(scheduler)

    def _clip(self, max_norm: float) -> None:
        assert self._loop is not None
        self._loop.clip(max_norm)

    def _swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        self.mesh()
        return dict(enumerate(gather_bytes(data, self.size)))

    def _apart(self) -> float:
        raise ConfigError(
            "pace.consensus() does not work on a mesh: this worker has only a part of the model. Leave it "
            "out."
        )

    def save(self, path: str | Path, **values: Any) -> None:
        """Refused: this worker has a part of the model."""
        raise ConfigError(
            "pace.save() does not work on a mesh: no worker has the whole model. Use --checkpoint-every; "
            "the run's folder has the whole model in weights.safetensors when it ends."
        )

    def load(self, path: str | Path) -> dict[str, Any]:
        """Refused: what was saved is whole."""
        raise ConfigError("pace.load() does not work on a mesh. Continue from a checkpoint with --resume.")

    def _idle(self) -> bool:
        return self._split is not None and self._split.idle

    def _plan(self, epochs: int) -> None:
        self._channel.send(m.Plan(epochs))

    def _end_work(self, why: str) -> None:
        self._stopped = False  # all end before the same iteration, this worker too
        self._channel.send(m.EndWork(why))

    def _warn(self, text: str) -> None:
        self.warn(text)

    def warn(self, text: str) -> None:
        """Tell a person what is likely not meant."""
        self._channel.send(m.Noted("warning", text))

    def note(self, text: str) -> None:
        """Put something on record that a person should read."""
        self._channel.send(m.Noted("info", text))
