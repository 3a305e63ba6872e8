"""What a run tells about itself: one schema for real and simulated runs.

A trace is a file of JSON lines, one event each, in the order of time. `t` is seconds since the run
began, on the run's own clock (virtual in a simulation). Progress bars, tables, reports, the advisor
and the tests read only this.

The life of one iteration of worker w, as a reader reconstructs it:
  compute   from `t - compute_s` to `t` of the `Decided` with `pushed == w`
  wait      from there to the `t` of the first later `Decided` (or the same one) that releases w
  exchange  from there, for `exchange_s`: the store applies, reduces, copies, and answers
A peer may wait more often: `more_wait_s` of its next `Decided` or `WorkerLeft` has the rest, `travel_s` all
that it slept while exchanges were carried out. Compute, waits and travel_s are the time that it took part.
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
    """The accuracy whose first reaching counts as *time to target*."""
    emulated: dict[str, Any] | None = None
    """Injected slow-downs and device times, or the simulated cluster; None: every worker ran as it was."""
    balance: bool = False
    """Whether every worker's batch was in proportion to its speed."""
    summarised: bool = False
    """True when decisions are summed up in `Progress` and `Totals` instead of written one by one."""
    compress: str = "none"
    """How peers compressed what they gave to an average."""
    correct: str = "none"
    """What was done about stale gradients."""
    family: Literal["paced", "peer", "split"] = "paced"
    """Whether a store decides, workers meet among themselves, or the model is split over them."""
    mesh: dict[str, int] = {}
    """The axes of the grid that the workers of a split model form, the last one counting fastest."""
    fabric: str | None = None
    """How vectors travelled; None when none did, as in a simulation of times."""
    protocol_sha256: str = ""
    """Of the file of a protocol of one's own; empty for those of the package."""
    trigger: float | None = None
    """The share of the usual norm from which on gradients were pushed; None: all were."""


class ModelReady(Event, frozen=True, gc=False, tag="model_ready"):
    """The store holds the model."""

    parameters: int
    weight_bytes: int
    gradient_bytes: int
    samples_per_epoch: int | None = None
    batches_per_epoch: int | None = None


class WorkerJoined(Event, frozen=True, gc=False, tag="worker_joined"):
    """A worker takes part from now on."""

    worker: int
    pid: int | None = None


class WorkerLeft(Event, frozen=True, gc=False, tag="worker_left"):
    """A worker takes part no longer; `unfinished` samples it had drawn are dispensed again."""

    worker: int
    reason: Literal["finished", "away", "died", "failed", "stopped"]
    detail: str = ""
    unfinished: int = 0
    work: tuple[tuple[int, int, int], ...] = ()
    """The batches of these, as in `Decided`."""
    more_wait_s: float = 0.0
    travel_s: float = 0.0


class Decided(Event, frozen=True, gc=False, tag="decided"):
    """One verdict: what became of a push, and who was released.

    `number` counts verdicts; with `pushed` None it was asked for by a change of membership or a timer.
    """

    number: int
    pushed: int | None
    version: int
    """Optimizer steps made, after this verdict."""
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
    """What carrying it out took: in a real run the store's time until the last answer was sent, in a
    simulation the pushing worker's links and the store."""
    work: tuple[tuple[int, int, int], ...] = ()
    """Batches behind the push: (epoch, first position in the epoch's order, count)."""
    more_wait_s: float = 0.0
    travel_s: float = 0.0
    withheld: int = 0
    """How many more calls of `optimizer.step()` its gradient is the sum of, which were not pushed then."""
    forced: bool = False
    """Whether it was pushed without having come to the share that triggers."""


class Asked(Event, frozen=True, gc=False, tag="asked"):
    """The time had come that the protocol had asked for; a `Decided` follows if it changed anything."""


class Passed(Event, frozen=True, gc=False, tag="passed"):
    """A worker passed the barrier that it keeps itself; the `Decided` that releases it follows."""

    worker: int
    looks: int
    """How often it looked at a sample of the others."""
    asked: int
    """Clocks it asked for in all these looks."""


class Exchanged(Event, frozen=True, gc=False, tag="exchanged"):
    """Peers have met, the last of them at `t`: each gave away so many bytes, and got as many, or as told."""

    operation: Literal["average", "mix", "agree", "exchange", "send"]
    """`send`: what workers of a mesh have sent each other since the last such line, along an axis."""
    workers: tuple[int, ...]
    bytes: int
    seconds: float = 0.0
    """What carrying it out took, from then on."""
    answer_bytes: int | None = None
    """What each got; None: as much as it gave."""
    axis: str | None = None
    """Along which axis of a mesh."""
    ahead: bool | None = None
    """Whether those who gave went on meanwhile; None: under this protocol nobody does."""


class LookedUp(Event, frozen=True, gc=False, tag="looked_up"):
    """What a worker's lookups have cost since the last such line."""

    worker: int
    lookups: Lookups


class Came(Event, frozen=True, gc=False, tag="came"):
    """A peer came to meet the others or to evaluate, other than with its push. A replay follows the order."""

    worker: int


class Rested(Event, frozen=True, gc=False, tag="rested"):
    """All peers slept, as somebody had asked for: the mean of their models was taken."""


class Planned(Event, frozen=True, gc=False, tag="planned"):
    """How many epochs the script means to run; without it nobody knows the time left."""

    epochs: int
    before: int = 0
    """Samples of these epochs that the run which is resumed has done."""


class WorkEnded(Event, frozen=True, gc=False, tag="work_ended"):
    """A worker's script has ended training for all, however many epochs were planned."""

    worker: int
    why: str

    @property
    def text(self) -> str:
        """The same for people."""
        return f"rank {self.worker} ended training for all{f': {self.why}' if self.why else ''}"


class LeadPassed(Event, frozen=True, gc=False, tag="lead_passed"):
    """A worker prints and evaluates for all from here on: whoever did so before is gone."""

    worker: int
    clock: int
    """Iterations that it had completed when it heard of it."""
    epoch: int | None = None
    """The epoch at whose end it heard of it; None: it was the answer to a push, or to its coming."""

    @property
    def text(self) -> str:
        """The same for people."""
        return leads_now(self.worker)


class Reported(Event, frozen=True, gc=False, tag="reported"):
    """What a worker said with `pace.report`."""

    worker: int
    clock: int
    values: Values

    def __post_init__(self) -> None:
        _null_to_nan(self.values)


class Evaluated(Event, frozen=True, gc=False, tag="evaluated"):
    """What the lead measured on a consistent snapshot; `t` is when the snapshot was taken.

    It is written when the measuring is done, so its `t` may lie before that of earlier lines.
    """

    worker: int
    version: int
    samples: int
    """Samples that had gone into that snapshot."""
    values: Values
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _null_to_nan(self.values)


class Note(Event, frozen=True, gc=False, tag="note"):
    """Something a person should read."""

    level: Literal["info", "warning", "error"]
    text: str


class Silent(Event, frozen=True, gc=False, tag="silent"):
    """A worker has not been heard of for longer than usual."""

    worker: int
    seconds: float
    """Since its last word, or since it was last answered."""
    waiting: tuple[int, ...] = ()
    """Who waits for it."""
    clock: int = 0
    """Iterations it has completed."""
    state: str = "computing"
    """What it was to do: computing, evaluating or preparing."""
    folder: str = ""
    apart: bool = False
    """Whether workers exchange among themselves: then some may wait without the store's knowledge."""

    @property
    def text(self) -> str:
        """The same for people."""
        where = "" if self.state == "preparing" else f" after iteration {self.clock:,}"
        unseen = self.apart and not self.waiting
        who = "others may wait for it in an exchange" if unseen else waiting_words(self.waiting)
        ask = f" To see where it is: paceline why {self.folder}" if self.folder else ""
        return f"rank {self.worker} is silent for {self.seconds:.0f} s, {self.state}{where}; {who}.{ask}"


class Heard(Event, frozen=True, gc=False, tag="heard"):
    """A worker is back that was silent."""

    worker: int
    seconds: float

    @property
    def text(self) -> str:
        """The same for people."""
        return f"rank {self.worker} is back after {self.seconds:.0f} s"


class Kept(Event, frozen=True, gc=False, tag="kept"):
    """A checkpoint was taken at `t` and is on the disk now; written when it is, so its `t` lies before."""

    version: int
    """Updates that are in it."""
    samples: int
    copy_s: float
    """How long training waited for it."""
    write_s: float = 0.0
    """How long writing took meanwhile."""


class Progress(Event, frozen=True, gc=False, tag="progress"):
    """Where a summarised run stands."""

    pushes: int
    samples: int
    version: int
    slowest: int
    fastest: int
    waiting: int
    loss_sum: float = 0.0
    """Of losses that were reported and left out so far, without those that are no number."""
    loss_count: int = 0
    diverged: bool = False
    """Whether one of them was no number."""


class Totals(Event, frozen=True, gc=False, tag="totals"):
    """What a summarised run adds up to; written once, before `RunEnded`."""

    pushes: int
    samples: int
    max_gap: int | None
    """None when nobody was released."""
    staleness: dict[int, int]
    """How many applied gradients had each staleness."""
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    pushes_each: tuple[int, ...] = ()
    """Per worker; empty in older traces."""
    looks: int | None = None
    """At barriers that workers keep themselves, by all of them; None where they keep none."""
    asked: int | None = None
    """Clocks asked for in these."""
    version: int | None = None
    """Updates made; None: the last `Progress` tells."""
    sent_each: tuple[int, ...] = ()
    """Bytes that each peer gave away."""
    got_bytes: int = 0
    """Bytes that all peers got."""
    lssr: float | None = None
    """The last share of local steps that was told."""
    losses: tuple[float | None, ...] = ()
    """The last losses that were reported."""
    travel_s: tuple[float, ...] = ()
    withheld: int = 0
    """Gradients that were pushed with a later one."""
    forced: int = 0
    """Pushes that were not triggered."""
    ahead_bytes: int | None = None
    """Of what peers gave away, that with which they went on; None: under this protocol nobody does."""
    consensus_distance: float | None = None
    """The last distance of replicas from their mean."""
    landscape: LandscapeSummary | None = None
    """What was measured of the landscape."""
    sent_along: dict[str, int] = {}
    """Bytes that all workers sent along each axis of a mesh."""
    lookups: dict[int, Lookups] = {}
    """What looking up in embedding tables has cost each worker."""


class Gap(Event, frozen=True, gc=False, tag="gap"):
    """Before this line events are missing that were not, or could not be, written from `since` to `t`."""

    since: float
    events: int
    why: str
    wanted: bool = False
    """Whether somebody had asked for it."""

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
    """Whether running the same again would fail the same way."""
    samples_due: int | None = None
    """Samples of the epochs that the script began: what its passes over the loader should have trained on.
    None: nobody knows, without a prepared loader or with one whose data have no length."""


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
    """What the log of a worker has at the place from which on it is the one that prints."""
    return f"rank {rank} prints and evaluates from here on: the rank that did so before is gone"


def _null_to_nan(values: Values) -> None:
    for name, value in values.items():
        if value is None:
            values[name] = nan
