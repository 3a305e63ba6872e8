"""How figures are written: one way for the terminal and the report.

What is not known is a dash, never a zero: a reader must be able to tell *nobody waited* from *nobody
measured*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from paceline.protocols.grid import Grid
from paceline.trace import Result
from paceline.trace.events import RunStarted
from paceline.trace.landscape import LandscapeSummary
from paceline.trace.lookups import LookupSummary
from paceline.trace.tally import Moment

DASH = "—"
MANY_WORKERS = 8
"""Up to here every worker's figure is written out; beyond, their mean and maximum."""
MANY_SLOWED = 4

T = TypeVar("T")


def known(value: T | None, write: Callable[[T], str]) -> str:
    """The value as `write` puts it, or a dash."""
    return DASH if value is None else write(value)


def count(value: float) -> str:
    """A whole number, with thousands apart."""
    return f"{value:,.0f}"


def done_of(done: int | None, due: int | None) -> str:
    """How much was done, and of how much, where that is known: `720 of 960`."""
    told = known(done, count)
    return told if due is None or done is None else f"{told} of {count(due)}"


def rate(value: float) -> str:
    """A figure per second: three digits are all a measurement is good for."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share as whole percent."""
    return f"{100 * share:.0f} %"


def number(value: float) -> str:
    """A loss or the like: four significant digits."""
    return f"{value:.4g}"


def accuracy(value: float) -> str:
    """Percent when it is a share; a script that reports on another scale is taken at its word."""
    return f"{100 * value:.1f} %" if 0 <= value <= 1 else f"{value:.4g}"


def moment(result: Result, of: Moment | None) -> str:
    """Of when a figure is, unless it is of the end; and why it is not, if that is known."""
    if of is None or result.status == "running":
        return ""
    if of.samples is not None and result.samples is not None:
        at, end, unit = of.samples, result.samples, "sample"
    else:
        at, end, unit = of.updates, result.updates, "update"
    lost = any(each.worker == of.worker and each.t >= of.t for each in result.failures)
    if at >= end:
        return f" before rank {of.worker} was lost" if lost else ""
    why = f": not evaluated after rank {of.worker} was lost" if lost else ""
    return f" at {unit} {count(at)} of {count(end)}{why}"


def threshold(value: float) -> str:
    """An accuracy somebody set as a goal, without digits they did not write."""
    return f"{100 * value:.4g} %" if 0 <= value <= 1 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A length of time in the unit that keeps it short."""
    if value >= 2 * 3600:
        return f"{value / 3600:.1f} h"
    if value >= 600:
        return f"{value / 60:.1f} min"
    if value >= 100 or value == 0:
        return f"{value:.0f} s"
    if value >= 0.1:
        return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
    return f"{1000 * value:.3g} ms"


def stopwatch(value: float) -> str:
    """A length of time as a stopwatch shows it: minutes and seconds never change their place."""
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(value: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


def date(text: str) -> str:
    """A wall-clock time to the minute; what is not one is shown as it is."""
    if not text:
        return DASH
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text


def plural(amount: int, word: str) -> str:
    """`1 worker`, `4 workers`."""
    return f"{amount:,} {word}{'' if amount == 1 else 's'}"


def settings(values: Mapping[str, Any]) -> str:
    """Settings as they would be typed: `lower=3 upper=15`."""
    return " ".join(f"{key}={_plain(value)}" for key, value in values.items())


def title(run: Result | RunStarted, values: Mapping[str, Any]) -> str:
    """A protocol with its settings, balanced batches, corrections, how averages were compressed and sent."""
    further = " + balance" if run.balance else ""
    further += f" + {run.correct}" if run.correct != "none" else ""
    further += f" + {run.compress}" if run.compress != "none" else ""
    further += f" over {run.fabric}" if run.fabric not in (None, "shared") else ""
    return f"{run.protocol} {settings(values)}".strip() + further


def emulation(emulated: Mapping[str, Any]) -> str:
    """What was injected into a run, or the cluster it was simulated on, as a phrase; defaults left out."""
    told = {key: value for key, value in emulated.items() if key != "workers" and not _is_empty(value)}
    return ", ".join(_emulated_fact(key, value) for key, value in told.items())


def _emulated_fact(key: str, value: Any) -> str:
    if key == "slow" and isinstance(value, Mapping):
        return _slowed(value)
    if key == "device_time_s" and isinstance(value, int | float):
        return f"device time {seconds(value)}"
    if key == "jitter" and isinstance(value, int | float):
        return f"jitter {percent(value)}"
    return f"{key} {_plain(value)}"


def _slowed(factors: Mapping[str, Any]) -> str:
    if len(factors) <= MANY_SLOWED:
        return ", ".join(f"rank {rank} slowed {_plain(factor)}×" for rank, factor in factors.items())
    return f"{len(factors)} ranks slowed up to {_plain(max(factors.values()))}×"


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or value == 0 or value == () or value == []


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_plain(item)}" for key, item in value.items() if not _is_empty(item))
        return "(" + ", ".join(items) + ")"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_plain, value)) + ")"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and abs(value) >= 1e6:
        return count(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def waiting(shares: Sequence[float | None]) -> str:
    """Each worker's share of time spent waiting, in rank order: `58 56 57 0 %`."""
    measured = [share for share in shares if share is not None]
    if not measured:
        return DASH
    if len(shares) > MANY_WORKERS:
        mean = sum(measured) / len(measured)
        return f"mean {percent(mean)}, max {percent(max(measured))}"
    return " ".join(DASH if share is None else f"{100 * share:.0f}" for share in shares) + " %"


def kinds(results: Sequence[Result]) -> list[str]:
    """What a reader must know before trusting the figures: were they simulated or emulated?"""
    found = list(dict.fromkeys(map(_kind, results)))
    if len(found) == 1:
        return [kind for kind in found if kind]
    simulated = {result.simulated for result in results}
    notes = ["some runs are simulated"] if len(simulated) == 2 else ["simulated"] if True in simulated else []
    return [*notes, "emulated differently: compare with care"]


def _kind(result: Result) -> str:
    emulated = result.emulated or {}
    if not result.simulated:
        return f"emulated: {emulation(emulated)}" if emulated else ""
    slow = {key: value for key, value in emulated.items() if key == "slow"}
    return f"simulated: {emulation(slow)}" if emulation(slow) else "simulated"


def lane(start: RunStarted, rank: int) -> str:
    """A worker's name beside its timeline: on a mesh its stage or the like, and after # of which copy."""
    place = Grid(start.mesh).place(rank)
    copy = place.pop("data", None)
    where = " ".join(f"{axis} {index}" for axis, index in place.items())
    if not where:
        return f"rank {rank}"
    return where if copy is None else f"{where} #{copy}"


def by_axis(sent: Mapping[str, int]) -> str:
    """Bytes along the axes of a mesh."""
    return ", ".join(f"{size(total)} along {axis}" for axis, total in sent.items())


def lookups(told: LookupSummary) -> str:
    """What looking up in embedding tables came to, and who held the others up."""
    return (
        f"{told.latency_ms:.2f} ms each, longest {told.longest_ms:.1f} ms; busiest worker "
        f"{told.imbalance:.2f}x the mean of ids; slowest rank {told.straggler}, "
        f"{told.straggler_factor:.2f}x the mean"
    )


def landscape(told: LandscapeSummary) -> list[tuple[str, str]]:
    """What D-PSGD measured: which share of the learning rate acts, and what makes it less."""
    share, lowest, last = (percent(each) for each in (told.effective_lr, told.lowest, told.last))
    variance, noise = number(told.weight_variance), number(told.noise_strength)
    return [
        ("effective rate", f"{share} of the learning rate on average, lowest {lowest}, last {last}"),
        ("measured", f"variance of the weights up to {variance}, noise up to {noise}"),
    ]
