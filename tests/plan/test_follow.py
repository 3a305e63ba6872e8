"""Advice as settings: what is chosen, what a run makes of it, and whether it does as predicted."""

from __future__ import annotations

from functools import cache
from math import floor
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.advise import app
from paceline.config import RunConfig, config_of
from paceline.errors import ConfigError
from paceline.plan.staleness import Advice, PolicyStep, Request, advise, from_cluster, landscape
from paceline.plan.staleness.follow import follow, read_advice, write_advice
from paceline.protocols.settings import make
from paceline.sim import Cluster, Lognormal, simulate
from paceline.trace import read_trace
from paceline.trace.events import Decided
from support.runs import SCRIPTS
from support.shell import Shell

CLUSTER = Cluster(workers=8, compute=Lognormal(1.0, 0.3), slow={6: 4.0, 7: 4.0})
UNLIKE = ("--workers", 3, "--slow", "2:8", "--curvature", 10, "--curvature-min", 1, "--weighting", "sum")


@cache
def advised(lr: float) -> Advice:
    request = Request(curvature=10.0, curvature_min=1.0, weighting="sum", lr=lr)
    return advise(from_cluster(CLUSTER, "test"), landscape(request), request)


def test_a_run_that_drops_by_the_advised_version_gap_keeps_the_share_that_was_predicted() -> None:
    checked = [one for one in advised(lr=0.02).thresholds if one.updates >= 5]  # fewer are coarse
    assert len(checked) > 3
    for one in checked:
        limit = floor(one.updates)
        run = simulate(make("asp", {}), CLUSTER, iterations=100, drop_staler=limit).result()
        assert run.dropped is not None
        assert 1 - run.dropped / 800 == pytest.approx(one.kept, abs=0.06)


@pytest.mark.parametrize("weighting", ["mean", "sum", 0.5])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_groups_step_as_far_as_they_were_predicted_to(weighting: Any, size: int) -> None:
    advice, step = advised(lr=0.02), PolicyStep(0.02, 0.0, weighting)
    chosen = (size, advice.groups[1]), None
    slow = advice.workers[0]  # anything is better than what one worker does
    told = follow(slow, step, advice.learning_rate, 1e9, (None, ()), *chosen)
    assert (told.protocol, told.settings["first"]) == ("hybrid_sgd", size)
    config = RunConfig(run="", folder="", workers=8, weighting=told.weighting or "mean")
    assert config.step_share(size, 8, "part") == pytest.approx(step.share(8, size, flushed=True))
    make(told.protocol, told.settings)


@pytest.mark.parametrize("lr", [0.02, 0.1, 10.0])
def test_one_policy_is_followed_and_the_rate_is_never_above_what_it_is_for(lr: float) -> None:
    advice = advised(lr=lr)
    told = advice.follow
    assert (told.drop_staler is not None) + bool(told.park) + bool(told.settings) <= 1
    assert told.lr_cap is not None
    assert told.lr_cap <= lr
    if told.policy == "a lower learning rate":
        assert told.lr_cap <= advice.learning_rate.safe
    assert set(told.park).isdisjoint({0, *advice.active})


def test_where_nothing_helps_the_rate_is_cut_to_the_safe_one() -> None:
    advice = advised(lr=10.0)
    assert advice.follow.policy == "a lower learning rate"
    assert advice.follow.lr_cap == advice.learning_rate.safe


def test_advice_survives_its_file_and_another_file_is_refused(tmp_path: Any) -> None:
    told = advised(lr=0.02).follow
    write_advice(tmp_path / "a.json", told)
    assert read_advice(tmp_path / "a.json") == told
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no advice"):
        read_advice(tmp_path / "b.json")


def test_parked_workers_take_no_part_in_a_simulation_and_others_do_their_work() -> None:
    run = simulate(make("asp", {}), CLUSTER, iterations=20, park=(6, 7)).result()
    assert run.iterations == 160
    assert run.staleness is not None
    assert run.staleness.max < 30
    assert [share is None for share in run.waiting_share] == [False] * 6 + [True] * 2
    for wrong in ((0,), (8,)):
        with pytest.raises(ConfigError, match="cannot be parked"):
            simulate(make("asp", {}), CLUSTER, iterations=1, park=wrong)


def test_train_follows_a_file_of_advice_with_workers_parked(shell: Shell, tmp_path: Any) -> None:
    file = tmp_path / "advice.json"
    given = CliRunner().invoke(app, ["staleness", *map(str, UNLIKE), "--lr", "0.05", "--apply", str(file)])
    assert given.exit_code == 0, given.output
    told = read_advice(file)
    write_advice(file, type(told)(policy="by hand", workers=3, park=(2,), drop_staler=0, lr_cap=0.01))
    refused = shell("train", SCRIPTS / "train.py", "--advice", file, "-n", 2, "--", "momentum")
    assert (refused.code, "is for 3 workers" in refused.err) == (2, True)
    args = ("--", "momentum", "--samples", 64, "--epochs", 1)
    ran = shell("train", SCRIPTS / "train.py", "--advice", file, "--drop-staler", 1, "--json", *args)
    assert ran.code == 0, ran.err
    config = config_of(shell.runs / ran.json["run"])
    assert (config.protocol, config.workers, config.park) == ("asp", 3, (2,))
    assert (config.drop_staler, config.lr_cap) == (1, 0.01)  # what is typed wins
    pushes = [e for e in read_trace(shell.runs / ran.json["run"]) if isinstance(e, Decided) and e.samples]
    assert {e.pushed for e in pushes} == {0, 1}
    assert (ran.json["samples"], ran.json["failures"]) == (64, [])
