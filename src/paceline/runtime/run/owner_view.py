"""What parts of a run may ask of the process that owns it: an interface, so that they need not import it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from paceline.config import RunConfig
from paceline.protocols.rules.compression import Compression
from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.sim.costs import Costs
from paceline.sim.network.peers import HostCosts
from paceline.store.work.budget import Batch
from paceline.trace import LastingTrace


class VirtualTime(Protocol):
    """A clock that is not real: it knows how long things take, and lets sleepers wake when it is time."""

    def costs(self, size_bytes: int, compress: Compression) -> Costs | HostCosts:
        """What it costs peers to meet."""

    def put_off(self, time_s: float, rank: int, answer: Callable[[], None]) -> None:
        """Let a sleeping peer have its answer at a later time."""

    def exchange_s(self, rank: int) -> float:
        """What an exchange of this rank costs."""


class LeadView(Protocol):
    """Who prints and evaluates for all."""

    def tells(self, member: Member, run: Run) -> bool:
        """Whether a worker hears with this answer that it leads."""


class AfterStepCalls(Protocol):
    """Has some worker run what scripts want after a step."""

    def run(self, which: int, ranks: Iterable[int]) -> None:
        """An optimizer has stepped with gradients of these workers."""


class OwnerView(Protocol):
    """The owner of a run, as its parts see it."""

    config: RunConfig
    members: dict[int, Member]
    trace: LastingTrace
    keeping: CheckpointWriter
    virtual: VirtualTime | None
    cores: int
    halted: m.Halt | None
    stopping: m.Halt | None
    """What whoever is to be released is told instead: the run ends in good order."""
    on_release: Callable[[int], None]
    """Told of every worker that starts to compute."""
    on_added: Callable[[int], None]
    """Told of every worker that is left to a barrier of its own."""
    ask_at: float | None

    @property
    def leading(self) -> LeadView:
        """Who prints and evaluates for all."""

    @property
    def living(self) -> list[Member]:
        """Members that are still there, by rank."""

    @property
    def ending(self) -> bool:
        """Whether the run is over, or about to be."""

    @property
    def last_word(self) -> m.Halt | None:
        """What workers are told that ask for more, once the run is over or about to be."""

    @property
    def after_steps(self) -> AfterStepCalls:
        """What has workers run what scripts want after a step."""

    def now(self) -> float:
        """Seconds since training began."""

    def note(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """Something for people to read."""

    def draw(self, member: Member) -> Batch | None:
        """The member's next batch, if there is one."""

    def report(self, member: Member, values: dict[str, float] | None) -> None:
        """Put on record what a script reported."""

    def send(self, member: Member, message: m.FromStore, fds: tuple[int, ...] = ()) -> None:
        """Answer."""
