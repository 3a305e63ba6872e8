"""One stage of a pipeline, as a generator of operations that somebody else carries out.

It knows delays, queues and counters, and neither tensors nor processes nor a clock: real workers, the
simulator and the tests drive the very same object. One generator is one iteration of one stage; all stages do
equally many, and nobody waits for anybody but at the queues between neighbours.

A queue that delays by d begins with d empty tokens. Tokens are numbers of batches, None is an empty one. An
empty token costs no computation: it is there to be counted, while a pipeline fills and when it runs dry.

Checked always: the gradient that comes back belongs to the oldest batch that waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError, RunError
from paceline.parallel.pipeline.delays import Delays

Stored = Literal["inputs", "graph"]
Weights = Literal["current", "stashed"]
Order = Literal["forward_first", "backward_first"]
Token = int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a pipeline does with its batches; all published variants are settings of it."""

    delays: Delays
    stored: Stored = "inputs"
    """What a stage keeps of a batch until its gradient comes: the inputs, to compute it once more, or all of
    what autograd needs."""
    weights: Weights = "current"
    """At which weights a batch is back-propagated: those of now, or a copy of those it was forwarded at."""
    order: Order = "forward_first"
    """What comes first in an iteration."""
    shrink: float = 1.0
    """A factor on the gradient at every boundary it crosses."""
    every: int = 1
    """Batches that are back-propagated for one update."""
    predict: bool = False
    """Whether a batch is forwarded at the weights that momentum is expected to lead to by its backward."""

    def __post_init__(self) -> None:
        waits = any(m > 0 for m in self.delays.m)
        if self.stored == "graph" and self.weights == "current" and waits:
            raise ConfigError(
                "a stored graph belongs to the weights it was computed with: stored=graph needs "
                "weights=stashed. Use stored=inputs to back-propagate at the current weights."
            )
        if self.order == "backward_first" and any(
            p + q < 1 for p, q in zip(self.delays.p, self.delays.q, strict=False)
        ):
            raise ConfigError(
                "with order=backward_first a stage would wait for a gradient of what it has not sent yet. "
                "Give every boundary a delay (p + q >= 1), or use forward_first."
            )
        if self.every < 1:
            raise ConfigError(f"a pipeline updates after every 1 or more batches, got {self.every}.")
        if not 0 < self.shrink <= 1:
            raise ConfigError(
                f"gradients shrink by a factor in (0, 1], got {self.shrink:g}. 1 is not at all."
            )


@dataclass(frozen=True, slots=True)
class TakeBatch:
    """The first stage: the next batch, whose number this is, and its labels on their way to the last."""

    index: int


@dataclass(frozen=True, slots=True)
class TakeActivation:
    """The next token from the stage before. Answers the number of its batch, or None."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a batch, and keep of it what its backward needs."""

    index: int
    keep: Literal["inputs", "graph"]
    stash: bool
    """Whether a copy of the weights is kept with it."""


@dataclass(frozen=True, slots=True)
class SendActivation:
    """A token to the stage behind, with what was computed."""

    token: Token


@dataclass(frozen=True, slots=True)
class TakeGradient:
    """The next token from the stage behind. Answers the number of its batch, or None."""


@dataclass(frozen=True, slots=True)
class Backward:
    """Back-propagate a batch; with `again` it is computed once more first."""

    index: int
    again: bool
    scale: float


@dataclass(frozen=True, slots=True)
class SendGradient:
    """A token to the stage before, with the gradient of its outputs."""

    token: Token


@dataclass(frozen=True, slots=True)
class Update:
    """One step of the stage's optimizer, with the gradients of these batches."""

    batches: tuple[int, ...]


Operation = (
    TakeBatch | TakeActivation | Forward | SendActivation | TakeGradient | Backward | SendGradient | Update
)
Steps = Generator[Operation, Any, None]


class Stage:
    """One stage. Its memory lives here and not in the frame, to be looked at between iterations."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        delays = schedule.delays
        self.schedule, self.stage = schedule, stage
        self.last = stage == delays.stages - 1
        self.delay = delays.m[stage]
        self._empty_activations = delays.p[stage - 1] if stage else 0
        self._empty_gradients = 0 if self.last else delays.q[stage]
        self.waiting: deque[tuple[int, int]] = deque()
        """Batches that were forwarded and not back-propagated yet, each with the updates made by then."""
        self._gathered: list[int] = []
        self.batches = self.iterations = self.updates = 0
        self.staleness = 0
        """Updates between forward and backward of the batch that was back-propagated last."""

    def iteration(self, feed: bool) -> Steps:
        """One iteration. `feed`: whether there is another batch; only the first stage asks."""
        self.iterations += 1
        if self.last:
            token = yield from self._forward(feed)
            yield from self._backward(token)
        elif self.schedule.order == "forward_first":
            yield from self._forward(feed)
            yield from self._backward((yield from self._gradient()))
        else:
            yield from self._backward((yield from self._gradient()))
            yield from self._forward(feed)

    def finish(self) -> Steps:
        """After a drain: step with what was gathered for an update that has not come."""
        if self._gathered:
            yield from self._update()

    @property
    def drained(self) -> bool:
        """Whether nothing is under way here."""
        return not self.waiting and not self._gathered

    def _forward(self, feed: bool) -> Generator[Operation, Any, Token]:
        token = yield from self._activation(feed)
        if token is not None:
            self.waiting.append((token, self.updates))
            plain = self.delay == 0
            keep: Stored = "graph" if plain else self.schedule.stored
            yield Forward(token, keep, self.schedule.weights == "stashed" and not plain)
        if not self.last:
            yield SendActivation(token)
        return token

    def _activation(self, feed: bool) -> Generator[Operation, Any, Token]:
        if self.stage == 0:
            if not feed:
                return None
            self.batches += 1
            yield TakeBatch(self.batches - 1)
            return self.batches - 1
        if self._empty_activations:
            self._empty_activations -= 1
            return None
        token: Token = yield TakeActivation()
        return token

    def _gradient(self) -> Generator[Operation, Any, Token]:
        if self._empty_gradients:
            self._empty_gradients -= 1
            return None
        token: Token = yield TakeGradient()
        return token

    def _backward(self, token: Token) -> Steps:
        if token is None:
            if self.stage:
                yield SendGradient(None)
            return
        index, updates = self.waiting.popleft() if self.waiting else (None, 0)
        if index != token:
            raise RunError(
                f"stage {self.stage} got the gradient of batch {token}, and waits for that of {index}."
            )
        self.staleness = self.updates - updates
        again = self.schedule.stored == "inputs" and self.delay > 0
        yield Backward(token, again, 1.0 if self.last else self.schedule.shrink)
        if self.stage:
            yield SendGradient(token)
        self._gathered.append(token)
        if len(self._gathered) == self.schedule.every:
            yield from self._update()

    def _update(self) -> Steps:
        gathered, self._gathered = tuple(self._gathered), []
        self.updates += 1
        yield Update(gathered)
