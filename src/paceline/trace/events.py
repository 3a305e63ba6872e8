"""The events of a run's trace: one schema for real and simulated runs.

A trace is a file of JSON lines, one event each, in the order of time. `t` is seconds since the run
began, on the run's own clock (virtual in a simulation). Progress bars, tables, reports, the advisor
and the tests read only this.

How to reconstruct one iteration of worker w:
  compute   from `t - compute_s` to `t` of the `Decided` with `pushed == w`
  wait      from there to the `t` of the first later `Decided` (or the same one) that releases w
  exchange  from there, for `exchange_s`: the store applies, reduces, copies, and answers
A peer may wait several times: `more_wait_s` of its next `Decided` or `WorkerLeft` holds the other waits, and
`travel_s` the time it slept during exchanges. Compute, waits and travel_s add up to the time it took part.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline.trace.landscape import LandscapeSummary
from paceline.trace.lookups import Lookups as Lookups
from paceline.trace.waits import waiting_words

SCHEMA = 1

# JSON has no NaN: a loss that diverged is written as null, and read back as NaN.
if TYPE_CHECKING:
    Values = dict[str, float]
else:
    Values = dict[str, float | None]


class Event(msgspec.Struct, frozen=True, tag_field="event", omit_defaults=True, gc=False):
    """Something that happened at `t`."""

    t: float


class RunStarted(Event, frozen=True, gc=False, tag="run_started"):
    """Always the first event."""

    schema: int
    run: str
    protocol: str
    settings: dict[str, Any]
    workers: int
    seed: int
    simulated: bool
    started_at: str
    """Wall-clock time, ISO 8601."""
    script: str | None = None
    target: float | None = None
    """The target accuracy. *Time to target* is when it is first reached."""
    emulated: dict[str, Any] | None = None
    """Injected slow-downs and device times, or the simulated cluster. None: nothing was emulated."""
    balance: bool = False
    """Whether every worker's batch was in proportion to its speed."""
    summarised: bool = False
    """Whether decisions are summed up in `Progress` and `Totals` instead of being written one by one."""
    compress: str = "none"
    """How peers compressed the vectors they averaged."""
    correct: str = "none"
    """How stale gradients were corrected."""
    family: Literal["paced", "peer", "split"] = "paced"
    """Whether there is a store, workers exchange among themselves, or the model is split over them."""
    mesh: dict[str, int] = {}
    """The axes of the mesh if the model is split; ranks count through the last axis first."""
    fabric: str | None = None
    """How vectors travelled; None when none did, as in a simulation of times."""
    protocol_sha256: str = ""
    """SHA-256 of the file of a user's own protocol; empty for built-in protocols."""
    trigger: float | None = None
    """Gradients were pushed if their norm was at least this share of the usual one. None: all were pushed."""


class ModelReady(Event, frozen=True, gc=False, tag="model_ready"):
    """The store holds the model."""

    parameters: int
    weight_bytes: int
    gradient_bytes: int
    samples_per_epoch: int | None = None
    batches_per_epoch: int | None = None


class WorkerJoined(Event, frozen=True, gc=False, tag="worker_joined"):
    """A worker joined the run."""

    worker: int
    pid: int | None = None


class WorkerLeft(Event, frozen=True, gc=False, tag="worker_left"):
    """A worker left the run. Its `unfinished` samples are given to other workers."""

    worker: int
    reason: Literal["finished", "away", "died", "failed", "stopped"]
    detail: str = ""
    unfinished: int = 0
    work: tuple[tuple[int, int, int], ...] = ()
    """The batches of these samples, as in `Decided`."""
    more_wait_s: float = 0.0
    travel_s: float = 0.0


class Decided(Event, frozen=True, gc=False, tag="decided"):
    """One verdict: what happened to a push, and which workers were released.

    `number` counts verdicts. If `pushed` is None, the cause was a change of membership or a timer.
    """

    number: int
    pushed: int | None
    version: int
    """Number of optimizer steps after this verdict."""
    fate: Literal["apply", "hold", "drop", "skip"] | None = None
    """`skip`: the gradient was not finite and the run was told to skip such gradients."""
    flush: Literal["mean", "part", "sum"] | None = None
    flushed: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    clock: int = 0
    """Iterations the pushing worker has completed, this one included."""
    samples: int = 0
    read: int = 0
    """The version the pushed gradient was computed on."""
    staleness: int = 0
    gap: int = 0
    """The largest lead over the slowest among the released."""
    lr_scale: float = 1.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    """How long the exchange took: in a real run the store's time until the last answer was sent, in a
    simulation the time on the pushing worker's links and in the store."""
    work: tuple[tuple[int, int, int], ...] = ()
    """Batches of the push: (epoch, first position in the epoch's order, count)."""
    more_wait_s: float = 0.0
    travel_s: float = 0.0
    withheld: int = 0
    """How many earlier calls of `optimizer.step()` were not pushed then and are part of this gradient."""
    forced: bool = False
    """Whether it was pushed although its norm was below the trigger."""


class Asked(Event, frozen=True, gc=False, tag="asked"):
    """A timer that the protocol had set ran out. A `Decided` follows if it changed anything."""


class Passed(Event, frozen=True, gc=False, tag="passed"):
    """A worker passed its own barrier; the `Decided` that releases it follows."""

    worker: int
    looks: int
    """How often it checked a sample of the others."""
    asked: int
    """Clocks it asked for in these checks."""


class Exchanged(Event, frozen=True, gc=False, tag="exchanged"):
    """Peers exchanged vectors; the last of them came at `t`. Each sent `size_bytes`, and received
    `answer_bytes`, or as many if that is None."""

    operation: Literal["average", "mix", "agree", "exchange", "send"]
    """`send`: what the workers of a mesh have sent each other along an axis since the last such event."""
    workers: tuple[int, ...]
    bytes: int
    seconds: float = 0.0
    """How long the exchange took from then on."""
    answer_bytes: int | None = None
    """Bytes that each received. None: as many as it sent."""
    axis: str | None = None
    """The axis of the mesh."""
    ahead: bool | None = None
    """Whether the workers continued meanwhile. None: under this protocol they never do."""


class LookedUp(Event, frozen=True, gc=False, tag="looked_up"):
    """The cost of a worker's lookups since the last such event."""

    worker: int
    lookups: Lookups


class Came(Event, frozen=True, gc=False, tag="came"):
    """A peer came to an exchange or an evaluation without a push. A replay follows this order."""

    worker: int


class Rested(Event, frozen=True, gc=False, tag="rested"):
    """All peers paused because a worker had asked for it, and the mean of their models was computed."""


class Planned(Event, frozen=True, gc=False, tag="planned"):
    """How many epochs the script plans. Without it the remaining time is unknown."""

    epochs: int
    before: int = 0
    """Samples of these epochs that the run which is resumed has done."""


class WorkEnded(Event, frozen=True, gc=False, tag="work_ended"):
    """A worker's script ended training for all workers, whatever number of epochs was planned."""

    worker: int
    why: str

    @property
    def text(self) -> str:
        """The same for people."""
        return f"rank {self.worker} ended training for all{f': {self.why}' if self.why else ''}"


class LeadPassed(Event, frozen=True, gc=False, tag="lead_passed"):
    """A worker became the lead, which prints and evaluates, because the former lead is gone."""

    worker: int
    clock: int
    """Iterations it had completed when it was told."""
    epoch: int | None = None
    """The epoch at whose end it was told. None: it was told in the answer to a push, or when it joined."""

    @property
    def text(self) -> str:
        """The same for people."""
        return leads_now(self.worker)


class Reported(Event, frozen=True, gc=False, tag="reported"):
    """What a worker reported with `pace.report`."""

    worker: int
    clock: int
    values: Values

    def __post_init__(self) -> None:
        _null_to_nan(self.values)


class Evaluated(Event, frozen=True, gc=False, tag="evaluated"):
    """What the lead measured on a consistent snapshot; `t` is when the snapshot was taken.

    It is written after the measurement, so its `t` may be earlier than that of earlier lines.
    """

    worker: int
    version: int
    samples: int
    """Samples the model had been trained on."""
    values: Values
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _null_to_nan(self.values)


class Note(Event, frozen=True, gc=False, tag="note"):
    """Something a person should read."""

    level: Literal["info", "warning", "error"]
    text: str


class Silent(Event, frozen=True, gc=False, tag="silent"):
    """A worker has been silent for longer than usual."""

    worker: int
    seconds: float
    """Seconds since its last message, or since it was last answered."""
    waiting: tuple[int, ...] = ()
    """The workers that wait for it."""
    clock: int = 0
    """Iterations it has completed."""
    state: str = "computing"
    """What it was doing: computing, evaluating or preparing."""
    folder: str = ""
    apart: bool = False
    """Whether workers exchange among themselves; some may then wait without the store's knowledge."""

    @property
    def text(self) -> str:
        """The same for people."""
        where = "" if self.state == "preparing" else f" after iteration {self.clock:,}"
        unseen = self.apart and not self.waiting
        who = "others may wait for it in an exchange" if unseen else waiting_words(self.waiting)
        ask = f" To see where it is: paceline why {self.folder}" if self.folder else ""
        return f"rank {self.worker} is silent for {self.seconds:.0f} s, {self.state}{where}; {who}.{ask}"


class Heard(Event, frozen=True, gc=False, tag="heard"):
    """A silent worker has answered again."""

    worker: int
    seconds: float

    @property
    def text(self) -> str:
        """The same for people."""
        return f"rank {self.worker} is back after {self.seconds:.0f} s"


class Kept(Event, frozen=True, gc=False, tag="kept"):
    """A checkpoint was taken at `t` and is on disk now. The event is written after saving, so its `t` is
    earlier."""

    version: int
    """Number of updates in it."""
    samples: int
    copy_s: float
    """How long training waited for the copy."""
    write_s: float = 0.0
    """How long writing took, during training."""


class Progress(Event, frozen=True, gc=False, tag="progress"):
    """Where a summarised run stands."""

    pushes: int
    samples: int
    version: int
    slowest: int
    fastest: int
    waiting: int
    loss_sum: float = 0.0
    """Sum of the reported losses that were not written one by one, without NaN."""
    loss_count: int = 0
    diverged: bool = False
    """Whether one of them was NaN."""


class Totals(Event, frozen=True, gc=False, tag="totals"):
    """The totals of a summarised run; written once, before `RunEnded`."""

    pushes: int
    samples: int
    max_gap: int | None
    """None if no worker was released."""
    staleness: dict[int, int]
    """How many applied gradients had each staleness."""
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    pushes_each: tuple[int, ...] = ()
    """Per worker; empty in older traces."""
    looks: int | None = None
    """Checks of all workers at their own barriers; None if they have none."""
    asked: int | None = None
    """Clocks asked for in these checks."""
    version: int | None = None
    """Updates made. None: see the last `Progress`."""
    sent_each: tuple[int, ...] = ()
    """Bytes that each peer sent."""
    got_bytes: int = 0
    """Bytes that all peers received."""
    lssr: float | None = None
    """The last reported share of local steps."""
    losses: tuple[float | None, ...] = ()
    """The last losses that were reported."""
    travel_s: tuple[float, ...] = ()
    withheld: int = 0
    """Gradients that were pushed together with a later one."""
    forced: int = 0
    """Pushes that were not triggered."""
    ahead_bytes: int | None = None
    """Bytes that peers sent while they continued. None: under this protocol they never do."""
    consensus_distance: float | None = None
    """The last distance of replicas from their mean."""
    landscape: LandscapeSummary | None = None
    """Measurements of the loss landscape."""
    sent_along: dict[str, int] = {}
    """Bytes that all workers sent along each axis of a mesh."""
    lookups: dict[int, Lookups] = {}
    """Cost of lookups in embedding tables, per worker."""


class Gap(Event, frozen=True, gc=False, tag="gap"):
    """Events from `since` to `t` are missing before this line, because they were not or could not be
    written."""

    since: float
    events: int
    why: str
    wanted: bool = False
    """Whether the user had asked for that."""

    @property
    def text(self) -> str:
        """The same for people."""
        return (
            f"{self.events} events from {self.since:.1f} s on are not in the trace ({self.why}); "
            "the result counts them all the same"
        )


class RunEnded(Event, frozen=True, gc=False, tag="run_ended"):
    """Always the last event."""

    status: Literal["finished", "stopped", "failed"]
    detail: str = ""
    user_mistake: bool = False
    """Whether the same run would fail in the same way again."""
    samples_due: int | None = None
    """Samples in the epochs that the script began, all of which should have been trained on. None: unknown,
    because there is no prepared loader or its data have no length."""


AnyEvent = (
    RunStarted
    | ModelReady
    | WorkerJoined
    | WorkerLeft
    | Decided
    | Asked
    | Passed
    | Exchanged
    | LookedUp
    | Came
    | Rested
    | Planned
    | WorkEnded
    | LeadPassed
    | Reported
    | Evaluated
    | Note
    | Silent
    | Heard
    | Kept
    | Progress
    | Totals
    | Gap
    | RunEnded
)


def leads_now(rank: int) -> str:
    """The line in a worker's log from which on this worker prints."""
    return f"rank {rank} prints and evaluates from here on, because the former lead is gone"


def _null_to_nan(values: Values) -> None:
    for name, value in values.items():
        if value is None:
            values[name] = nan
