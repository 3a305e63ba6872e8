"""What a script may do with an ordinary loop on a mesh without its copies drifting apart in silence."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from paceline.trace.events import Evaluated, Note, WorkEnded
from support.runs import Lab, Run

SCRIPT = """
import sys
from itertools import islice
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.parallel.layers import parallelize

what, axes = sys.argv[1], sys.argv[2:]

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(4, 16)

    def forward(self, x, with_b=True):
        return (self.a(x) + (self.b(x) if with_b else 0)).mean(1, True)

torch.set_num_threads(1)
pace = paceline.join()
mesh = pace.mesh(data=2)
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(16, 4, generator=draw), torch.randn(16, 1, generator=draw))
model = Halves()
if what == "unfrozen":
    model.b.requires_grad_(False)
given = list(model.parameters())
factor = nn.Parameter(torch.ones(1))
if what == "beside":
    given.append(factor)
if "model=2" in axes:
    model = parallelize(model, mesh)
optimizer = torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
loader = DataLoader(data, 4 if pace.size == 1 else 2)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=what == "scaled")
seen = []
for epoch in pace.epochs({"broken off": 2, "stopped": 100}.get(what, 3)):
    if what == "unfrozen" and epoch == 1:
        model.b.requires_grad_(True)
    if what == "grouped" and epoch == 1:
        optimizer.add_param_group({"params": [factor]})
    for number, (x, y) in enumerate(islice(loader, 2) if what == "broken off" else loader):
        seen += x[:, 0].tolist()
        if what == "scaled" and pace.rank == 1 and not number:
            x = x * float("inf")
        optimizer.zero_grad()
        copies = 1 if pace.size == 1 else mesh.size("data")
        if what == "missing" and copies == 1:
            # as two copies, of which the first alone needs `b`
            out = torch.cat([model(x[:2], True), model(x[2:], False)])
        else:
            out = model(x, what != "missing" or mesh.index("data") == 0)
        loss = (out * (factor if what == "beside" else 1) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if what == "plateau":
        told = pace.evaluate(lambda model: {"loss": 1.0})
        if told and told["loss"] == 1.0:
            plateau.step(told["loss"])
    if what == "written":
        pace.evaluate(lambda model: {"loss": float(model.a.weight.data.mul_(2).sum())})
    if what == "stopped" and pace.evaluate(lambda model: {"loss": 1.0}):
        pace.stop("enough")
rates = pace.gather(torch.tensor([optimizer.param_groups[0]["lr"]]))
sums = pace.gather(torch.stack([p.detach().double().sum() for p in model.parameters()])[None])
first = sums[torch.arange(pace.size) % (pace.size // mesh.size("data"))]
pace.print("rates", rates.tolist(), "apart", (sums - first).abs().max().item())
print(len(seen), "samples, of them different", len(set(seen)))
"""

TRAINED = ("missing", "broken off", "plateau", "stopped")


def ran(lab: Lab, what: str, **axes: int) -> Run:
    """Along these axes; without any, one process has the batches of two copies together."""
    workers = 1
    for size in axes.values():
        workers *= size
    dials: dict[str, Any] = {"workers": workers} | ({"mesh": axes} if axes else {})
    run = lab.run(lab.script(SCRIPT), what, *(f"{name}={size}" for name, size in axes.items()), **dials)
    if what in TRAINED:
        assert run.result.status == "finished", f"{run.end.detail}\n{run.logs()}"
    return run


def refused(run: Run, said: str) -> None:
    assert run.result.status == "failed"
    assert run.end.user_mistake, run.end.detail
    assert said in run.end.detail


def test_what_one_copy_has_no_gradient_of_is_stepped_by_all_as_one_process_would(lab: Lab) -> None:
    """`c` has a gradient nowhere: nobody steps it, so its weights do not decay."""
    alone, copies = ran(lab, "missing"), ran(lab, "missing", data=2)
    for name, weights in alone.weights.items():
        assert_close(copies.weights[name], weights, rtol=1e-4, atol=1e-6)
    assert "apart 0.0" in copies.log()


def test_it_is_stepped_so_on_a_grid_too(lab: Lab) -> None:
    alone, grid = ran(lab, "missing"), ran(lab, "missing", data=2, model=2)
    for name, weights in alone.weights.items():
        assert_close(grid.weights[name], weights, rtol=1e-4, atol=1e-6)
    assert "apart 0.0" in grid.log()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("unfrozen", "requires a gradient now: 'b.weight'. Prepare it unfrozen"),
        ("beside", "a parameter of shape (1,) that is not in the model"),
        ("scaled", "a GradScaler on a mesh: it skips steps by what one worker has seen"),
        ("written", "rank 0 wrote to 'a.weight' in the function of pace.evaluate()"),
        ("grouped", "the optimizer got new parameters after pace.prepare(). Add them before."),
    ],
)
def test_what_would_part_the_copies_is_refused(lab: Lab, what: str, said: str) -> None:
    refused(ran(lab, what, data=2), said)


def test_a_pass_that_was_broken_off_is_gone_on_with_and_a_note_says_so(lab: Lab) -> None:
    run = ran(lab, "broken off", data=2)
    assert all("8 samples, of them different 8" in run.log(f"rank{rank}") for rank in range(2))
    assert [
        note.text for note in run.of(Note) if "broke off a pass over the loader after 2 of 4" in note.text
    ]


def test_everybody_gets_the_figures_and_can_lower_a_rate_by_them(lab: Lab) -> None:
    run = ran(lab, "plateau", data=2)
    rates = run.log().split("rates [")[1].split("]")[0].split(", ")
    assert [float(rate) for rate in rates] == pytest.approx([0.0005] * 2)
    assert "apart 0.0" in run.log()
    assert len(run.of(Evaluated)) == 3


def test_a_run_that_all_workers_end_ends_once(lab: Lab) -> None:
    run = ran(lab, "stopped", data=2)
    assert 4 <= run.result.updates < 4 * 100
    assert len(run.of(WorkEnded)) == 1
