"""A report of a bounded trace has the figures of the whole one: results, samples over time, mean losses."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.protocols.paced.ssp import SSP
from paceline.sim import simulate
from paceline.sim.cluster import Cluster
from paceline.trace.events import AnyEvent, Decided, Exchanged, Gap, LookedUp, Reported, RunEnded
from paceline.trace.lasting import LastingTrace
from paceline.trace.lookups import Lookups
from paceline.view.report.record import RunRecord, read_record
from support.runs import Lab

LIMITS = [0, 3000, 20_000]


def bounded(folder: Path, events: list[AnyEvent], limit: int | None) -> RunRecord:
    """What the report reads of a trace with that limit."""
    (folder / "trace.jsonl").unlink(missing_ok=True)
    trace = LastingTrace(folder / "trace.jsonl", limit)
    for event in events:
        trace.write(event)
    trace.close()
    return read_record(folder)


def figures(record: RunRecord) -> dict[str, Any]:
    """What is exact however a curve is drawn."""
    losses = record.training_loss
    return {
        "result": msgspec.to_builtins(record.result),
        "samples": sum(record.throughput._sums),
        "loss": sum(losses._sums),
        "losses": sum(losses._counts),
        "diverged": record.diverged,
        "evaluations": record.evaluated("accuracy"),
        "lost": len(record.lost),
    }


def check(folder: Path, events: list[AnyEvent]) -> None:
    whole = figures(bounded(folder, events, None))
    assert whole["samples"] == pytest.approx(sum(e.samples for e in events if isinstance(e, Decided)))
    for limit in LIMITS:
        record = bounded(folder, events, limit)
        assert any(isinstance(event, Gap) for event in record.tally.gaps)
        assert flat(figures(record)) == pytest.approx(flat(whole))
        assert (folder / "trace.jsonl").stat().st_size < limit + 30_000


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every figure by its path."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    parts = value if isinstance(value, dict) else dict(enumerate(value))
    return {path: each for key, part in parts.items() for path, each in flat(part, f"{name}.{key}").items()}


@pytest.mark.parametrize("diverges", [False, True])
def test_a_bounded_trace_of_a_simulation_has_the_figures_of_the_whole_one(
    tmp_path: Path, diverges: bool
) -> None:
    simulated: list[AnyEvent] = []
    simulate(SSP(3), Cluster(workers=3), iterations=300, trace=simulated.append)  # type: ignore[arg-type]

    def with_losses() -> Iterator[AnyEvent]:
        for number, event in enumerate(simulated):
            yield event
            if isinstance(event, Decided) and event.pushed is not None:
                loss = nan if diverges and number > len(simulated) // 2 else 1 / (number + 1)
                yield Reported(event.t, event.pushed, event.clock, {"loss": loss})

    check(tmp_path, list(with_losses()))


def test_a_bounded_trace_of_a_real_run_has_the_figures_of_the_whole_one(tmp_path: Path, lab: Lab) -> None:
    """Of a mesh, too, whose axes and lookups are added up like the rest."""
    run = lab.trained(lab.script(SCRIPT), workers=2, protocol="ssp")
    events = list(run.trace)
    assert len(events) > 100
    check(tmp_path, events)
    start, *middle, end = events
    mesh = msgspec.structs.replace(start, mesh={"data": 2}, family="peer")
    assert isinstance(end, RunEnded)
    for event in list(middle):
        if isinstance(event, Decided) and event.pushed is not None:
            at = middle.index(event)
            middle.insert(at, Exchanged(event.t, "send", (event.pushed,), 17, axis="data"))
            middle.insert(at, LookedUp(event.t, event.pushed, Lookups(2, 30 + at, 0.1, 0.2, 0.01 * at)))
    check(tmp_path, [mesh, *middle, end])


SCRIPT = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.join()
torch.manual_seed(1)
data = TensorDataset(torch.rand(256, 4), torch.rand(256, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
for _ in pace.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        pace.report(loss=loss.item())
"""
