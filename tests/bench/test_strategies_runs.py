"""How runs of the benchmark of strategies are made: the server's memory, DDP's buckets, how many seeds, what
diverges, and what is kept for later."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import RunError
from paceline_bench.experiment import run_all
from paceline_bench.strategies import cells as cells_module
from paceline_bench.strategies import series as series_module
from paceline_bench.strategies.cells import QUICK, Cell, Setup, chosen_cells
from paceline_bench.strategies.data import digits
from paceline_bench.strategies.outcome import StrategyResults, figures_of
from paceline_bench.strategies.roster import STRATEGIES, Strategy, chosen_strategies
from paceline_bench.strategies.runs.models import MODELS, make, parameter_bytes
from paceline_bench.strategies.runs.places import Ran, run_here
from paceline_bench.strategies.runs.request import Answer, StrategyRequest, read_answers, write_answer
from paceline_bench.strategies.runs.sides import DDPSide
from paceline_bench.strategies.series import Runner, StrategySeries

SHAPE = (1, 8, 8)


def request(**more: object) -> StrategyRequest:
    usual = {"folder": "", "data": "", "model": "vgg", "width": 16, "batch": 4, "lr": 0.01, "seed": 0}
    return msgspec.convert(usual | {"workers": 1} | more, StrategyRequest)


def answer(rank: int, steps: int, last_loss: float | None = 1.0, world: int = 2) -> Answer:
    return Answer(
        rank=rank,
        world=world,
        began=0.0,
        ends=[float(at) for at in range(1, steps + 1)],
        samples=[8] * steps,
        losses=[1.0] * (steps - 1) + [last_loss],
        held_bytes=0,
        peak_bytes=0,
        late=0.0,
    )


def series(*cells: str, seeds: tuple[int, ...] = (0, 1, 2)) -> StrategySeries:
    return StrategySeries(
        cells=chosen_cells(cells),
        strategies=chosen_strategies(["single"]),
        seeds=seeds,
        setup=QUICK,
        data="digits",
        version="1",
    )


@pytest.mark.timeout(120)
def test_a_server_has_weights_momentum_and_every_workers_gradient_and_shares_most_of_it(
    tmp_path: Path,
) -> None:
    data = digits().in_order(32, 0, tmp_path)
    asked = request(folder=str(tmp_path), data=str(data), width=64, workers=2)
    ran = run_here(STRATEGIES["ps-sync"], asked)
    seen = figures_of(ran, STRATEGIES["ps-sync"], Cell("vgg", 2, kind="memory"), QUICK, None)
    model = parameter_bytes(make("vgg", SHAPE, 64, 0))
    assert seen.server_bytes is not None
    assert 4 <= seen.server_bytes / model < 7
    assert seen.shared_bytes / model == pytest.approx(2, abs=0.1), "weights, and its own gradients"
    assert seen.first_host_bytes == seen.peak_bytes[0] + seen.server_bytes - seen.shared_bytes


@pytest.fixture
def a_group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("a_group_of_one")
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("buckets", "early"), [(None, False), (Setup().ddp_buckets, True)])
def test_buckets_leave_before_backward_has_come_to_the_first_unit(
    name: str, buckets: int | None, early: bool
) -> None:
    model = make(name, SHAPE, Setup().widths[name], 0)
    placed = DDPSide(request(ddp_buckets=buckets)).place(model)
    left: list[bool] = []

    def leaves(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are text
        first = next(model.parameters()).grad
        left.append(first is not None and bool(first.any()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    placed.register_comm_hook(None, leaves)
    for _ in range(3):  # buckets are made anew after the first
        left.clear()
        placed.zero_grad(set_to_none=False)
        placed(torch.randn(4, *SHAPE)).square().sum().backward()
    assert (left[0] is False) is early
    assert len(left) >= (3 if early else 1)


def test_ddp_has_buckets_on_throttled_links_and_torchs_own_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[int | None]] = {"here": set(), "bed": set()}

    def run(where: str, told: StrategyRequest) -> Ran:
        asked[where].add(told.ddp_buckets)
        raise RunError("seen")

    class Hosts:
        def __init__(self, workers: int, mbit: float) -> None: ...
        def down(self) -> None: ...
        def run(self, strategy: Strategy, told: StrategyRequest) -> Ran:
            return run("bed", told)

    monkeypatch.setattr(series_module, "Bed", Hosts)
    monkeypatch.setattr(series_module, "why_not", lambda: None)
    monkeypatch.setattr(series_module, "run_here", lambda strategy, told: run("here", told))
    whole = series("vgg-2-native-none", "vgg-2-throttled-none", "vgg-2-memory")
    run_all(
        Runner(whole, digits(), StrategyResults(None), lambda text: None).experiment(list), lambda text: None
    )
    assert asked == {"here": {None}, "bed": {QUICK.ddp_buckets}}


def test_every_cell_with_emulated_devices_and_native_links_has_all_seeds() -> None:
    native, others = ("vgg-4-native-none", "resnet-4-native-x2"), ("vgg-4-throttled-none", "vgg-2-real")
    whole = series(*native, *others, "vgg-2-memory")
    seeds = {cell.name: len(whole.passes(cell)) for cell in whole.cells}
    assert seeds == {
        "resnet-4-native-x2": 3,
        "vgg-4-native-none": 3,
        "vgg-4-throttled-none": 1,
        "vgg-2-real": 1,
        "vgg-2-memory": 1,
    }


def test_a_loss_that_is_no_number_is_read_back_and_is_no_result(tmp_path: Path) -> None:
    write_answer(tmp_path, answer(0, 5, world=1, last_loss=nan))
    ran = Ran(read_answers(tmp_path, 1), tmp_path, None)
    with pytest.raises(RunError, match="rank 0 had a loss of NaN or infinity in its iteration 5"):
        figures_of(ran, STRATEGIES["ddp"], Cell("vgg", 1, kind="memory"), QUICK, None)


def test_figures_have_the_steps_of_the_last_rank(tmp_path: Path) -> None:
    ran = Ran([answer(0, 20), answer(1, 11)], tmp_path, None)
    seen = figures_of(ran, STRATEGIES["ddp"], Cell("vgg", 2, kind="memory"), QUICK, None)
    assert seen.last_steps == 11


def test_runs_that_diverge_are_counted_and_others_that_fail_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {0: "rank 1 pushed a gradient with NaN or infinity in 'w'; nothing was applied.", 1: "gone"}

    def runs(strategy: Strategy, asked: StrategyRequest) -> Ran:
        if strategy.name == "ps-sync" and asked.seed in told:
            raise RunError(told[asked.seed])
        return Ran([answer(rank, 10, world=asked.workers) for rank in range(asked.workers)], tmp_path, None)

    monkeypatch.setattr(series_module, "run_here", runs)
    monkeypatch.setattr(type(digits()), "accuracy", lambda *_: 0.8)
    whole, results = series("vgg-2-native-none"), StrategyResults(None)
    run_all(Runner(whole, digits(), results, lambda text: None).experiment(list), lambda text: None)
    seen = whole.measured(whole.cells[0], STRATEGIES["ps-sync"], results)
    assert (len(seen.figures), seen.diverged, sorted(seen.accuracies)) == (1, 1, [0.1, 0.8])


def test_what_was_kept_before_runs_were_made_otherwise_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Setup().fingerprint
    assert msgspec.structs.replace(Setup(), ddp_buckets=5).fingerprint != usual
    assert msgspec.structs.replace(Setup(), rates=(0.1,)).fingerprint == usual
    (tmp_path / "runs").mkdir()
    for name in ("data.py", "roster.py", "server.py", "runs/sides.py"):
        (tmp_path / name).write_text("made otherwise\n")
    monkeypatch.setattr(cells_module, "FOLDER", tmp_path)
    assert Setup().fingerprint != usual
