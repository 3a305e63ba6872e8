"""How much of the time that bytes travel is hidden behind computing, on a link that is slow for real.

All workers live on one host of a testbed whose loopback is throttled, and exchange over gloo; their
compute is emulated, so that two cores do not decide the result. What blocks (local SGD that averages
after every step) takes compute + travel; what overlaps all of it can take the longer of the two. The
figure is the share of what could be hidden that was not.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.protocols import PEERS
from paceline.testbed import BedHost, HostSpec, Testbed, why_not
from paceline.trace import read_trace
from paceline.trace.events import Decided
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import spread
from paceline_bench.harness.throttle import throttle
from paceline_bench.micro import hiding_script

COMPUTE_S = 0.3
TARGET = 0.2
WARM_UP = 4
"""Iterations before the first that counts."""


class HidingCase(NamedTuple):
    """A protocol, and which share of its bytes it may send beside computing."""

    protocol: str
    settings: tuple[str, ...]
    share: float


BLOCKING = HidingCase("local_sgd", ("period=1",), 0.0)
OVERLAPPING = (
    HidingCase("hpsgd", ("round_length=1",), 1.0),
    HidingCase("osp", ("overlap=0.8", "ramp=constant", "rank_every=1"), 0.8),
)


class HidingPace(NamedTuple):
    """What one run took."""

    seconds: float
    """Per iteration, median."""
    bytes_sent: float
    """Per iteration."""


def hiding(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Links on which travel takes less time than computing, and more."""
    reason = why_not()
    if reason is not None:
        say(f"no slow link: {reason}")
        return []
    rows = []
    cases = [case for case in OVERLAPPING if case.protocol in PEERS]
    for mbit in (400,) if plan.quick else (200, 100):
        with Testbed.up({"a": HostSpec()}) as bed, tempfile.TemporaryDirectory() as folder:
            throttle(bed["a"], mbit)
            repeats = 1 if plan.quick else 2
            seen = [_round(bed["a"], [BLOCKING, *cases], plan, Path(folder)) for _ in range(repeats)]
        rows += [_row(case, mbit, plan, seen, say) for case in cases]
    return rows


def _round(host: BedHost, cases: list[HidingCase], plan: BenchPlan, folder: Path) -> dict[str, HidingPace]:
    """Each once, one after the other."""
    return {case.protocol: _run(host, case, plan, folder) for case in cases}


def _run(host: BedHost, case: HidingCase, plan: BenchPlan, folder: Path) -> HidingPace:
    width, iterations = (64, WARM_UP + 3) if plan.quick else (224, WARM_UP + 16)
    settings = [word for each in case.settings for word in ("--set", each)]
    emulated = ["--workers", "2", "--fabric", "gloo", "--device-time", str(COMPUTE_S)]
    script = ["--", "--width", str(width), "--iterations", str(iterations)]
    command = ["train", hiding_script.__file__, "-p", case.protocol, *settings, *emulated]
    program = [sys.executable, "-m", "paceline", *command, "--runs", str(folder), "--json", *script]
    done = host.run(program, timeout_s=120)
    if done.returncode:
        raise RunError(f"{case.protocol} did not run: {done.stderr.strip()[-300:]}")
    result = decode_json(done.stdout)
    times = [e.t for e in read_trace(folder / result["run"]) if isinstance(e, Decided) and e.pushed == 0]
    gaps = [later - sooner for sooner, later in pairwise(times)][WARM_UP:]
    return HidingPace(statistics.median(gaps), result["bytes_sent_each"][0] / iterations)


def _row(
    case: HidingCase, mbit: int, plan: BenchPlan, seen: list[dict[str, HidingPace]], say: Say
) -> BenchRow:
    missed = [_not_hidden(case, each) for each in seen]
    value = statistics.median(missed)
    say(f"hiding, {case.protocol} at {mbit} Mbit/s: {100 * value:.0f} % of what could be hidden was not")
    paces = {"paceline": spread([each[case.protocol].seconds for each in seen])}
    return BenchRow(
        case={"protocol": case.protocol, "link Mbit/s": mbit, "compute s": COMPUTE_S},
        measured=paces | {"blocking": spread([each[BLOCKING.protocol].seconds for each in seen])},
        figure="share",
        value=value,
        target=None if plan.quick else TARGET,
        remark=f"of {100 * case.share:.0f} % of its bytes",
    )


def _not_hidden(case: HidingCase, seen: dict[str, HidingPace]) -> float:
    """Travel takes what the blocking run needs beyond its compute, in proportion to the bytes."""
    mine, blocking = seen[case.protocol], seen[BLOCKING.protocol]
    travel = (blocking.seconds - COMPUTE_S) * mine.bytes_sent / blocking.bytes_sent
    could = min(COMPUTE_S, case.share * travel)
    best = COMPUTE_S + travel - could
    return max(0.0, mine.seconds - best) / could
