"""Advice as a whole, and the command that gives it."""

from __future__ import annotations

import json
from math import inf

import pytest
from typer.testing import CliRunner

from paceline.cli.advise import app
from paceline.plan.staleness import Request, advise, from_cluster, landscape
from paceline.sim import Cluster, Lognormal
from paceline.trace import TraceWriter
from paceline.trace.events import SCHEMA, Decided, RunStarted, WorkerJoined
from plan.recipes import bowl
from plan.test_observe import recorded

GIVEN = ["--curvature", "10", "--curvature-min", "1", "--noise", "1", "--loss", "2", "--weighting", "sum"]


def command(*args):
    return CliRunner().invoke(app, ["staleness", *map(str, args)])


def answer(*args):
    result = command(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def advised(workers=8, **given):
    cluster = Cluster(workers=workers, compute=Lognormal(1.0, 0.2))
    request = Request(**{"curvature": 10.0, "weighting": "sum", **given})
    return advise(from_cluster(cluster, "test"), landscape(request), request)


# -- advice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1e-3, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("safety", [0.5, 1.0])
def test_nothing_unstable_is_ever_advised(lr, safety):
    advice = advised(lr=lr, safety=safety)
    if advice.best is not None:
        assert advice.best.load < advice.best.critical
        assert advice.best.margin <= safety
    assert advice.learning_rate.safe <= min(0.5, safety) * advice.learning_rate.critical
    assert advice.group is None or advice.groups[advice.group].margin <= safety
    assert advice.threshold is None or advice.threshold.margin <= safety


def test_near_the_bound_it_warns_and_does_not_refuse():
    advice = advised(lr=10.0)
    assert not advice.now.stable
    assert advice.best is None
    assert advice.active == []
    assert any("above the bound" in text for text in advice.warnings)


@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_an_absurd_rate_is_told_to_be_unstable_at_any_staleness(spread):
    """Some of these once came out as convergence, after minutes."""
    request = Request(curvature=10.0, noise=1.0, loss=1.0, lr=1e7)
    advice = advise(
        from_cluster(Cluster(workers=4, compute=Lognormal(1.0, spread)), "test"), landscape(request), request
    )
    shown = [*advice.workers, advice.now, advice.lockstep, *advice.groups.values()]
    assert all(not one.stable and one.rate_per_s < 0 and one.floor == inf for one in shown)
    assert any("1e+07 is unstable at any staleness" in text for text in advice.warnings)


def test_a_rate_that_one_worker_stands_is_not_called_absurd():
    advice = advised(lr=0.1)
    assert not advice.now.stable
    assert advice.workers[0].stable
    assert not any("at any staleness" in text for text in advice.warnings)


def test_without_a_learning_rate_the_safe_one_is_taken():
    advice = advised()
    assert advice.now.margin == pytest.approx(0.5)
    [lr] = [fact for fact in advice.inputs if fact.name == "learning rate"]
    assert lr.origin == "modelled"
    assert lr.value == advice.learning_rate.safe


def test_all_workers_stay_unless_fewer_are_worth_it():
    calm = advised(workers=4, lr=1e-4, noise=1.0, loss=1.0, target_loss=0.1)
    assert calm.best is calm.now
    assert calm.active == [0, 1, 2, 3]
    crowded = advised(workers=12, lr=0.02, curvature_min=1.0)
    assert crowded.best is not None
    assert crowded.best.workers < 12


def test_one_worker_is_advised_to_be_one():
    advice = advised(workers=1, lr=0.01)
    assert advice.best is not None
    assert advice.best.workers == 1
    assert advice.now.staleness == 0


def test_what_is_unknown_stays_unknown():
    advice = advised(lr=0.01, target_loss=0.1)
    assert advice.now.floor is None
    assert advice.now.seconds_to_target is None
    assert advice.objective == "rate"
    assert any("--noise and --loss" in text for text in advice.warnings)


def test_it_says_that_corrections_are_not_taken_into_account():
    with_momentum, without = advised(lr=0.01, momentum=0.9), advised(lr=0.01)
    assert any("--correct none" in text for text in with_momentum.warnings)
    assert not any("--correct none" in text for text in without.warnings)


def test_a_target_below_the_floor_is_never_reached_and_said_so():
    advice = advised(lr=0.01, noise=100.0, loss=1.0, target_loss=1e-3)
    assert advice.now.seconds_to_target == float("inf")
    assert any("below the error floor" in text for text in advice.warnings)


# -- the command ---------------------------------------------------------------------------------


def test_every_input_says_where_it_comes_from(tmp_path):
    facts = answer("--workers", 4, "--recipe", bowl(tmp_path, 7.0, 1.0), "--lr", 0.01)["inputs"]
    origins = {fact["name"]: fact["origin"] for fact in facts}
    assert origins["sharpest curvature"] == origins["gradient noise"] == "measured"
    assert origins["cycle, s"] == origins["weighting"] == "modelled"
    assert origins["learning rate"] == "given"


def test_the_recipe_is_measured_and_given_figures_win(tmp_path):
    path = bowl(tmp_path, 7.0, 1.0)
    measured = answer("--workers", 4, "--recipe", path, "--weighting", "sum")
    given = answer("--workers", 4, "--recipe", path, "--weighting", "sum", "--curvature", 14)
    assert measured["learning_rate"]["critical"] == pytest.approx(
        2 * given["learning_rate"]["critical"], rel=0.01
    )


def test_learning_rate_and_momentum_come_from_the_recipes_optimizer_unless_given(tmp_path):
    more = "def optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.003, momentum=0.5)"
    path = bowl(tmp_path, 7.0, 1.0, more=more)
    for extra, lr, momentum in (((), 0.003, 0.5), (("--lr", 0.001, "--momentum", 0), 0.001, 0.0)):
        facts = {fact["name"]: fact["value"] for fact in answer("-n", 2, "--recipe", path, *extra)["inputs"]}
        assert (facts["learning rate"], facts["momentum"]) == (lr, momentum)


def test_a_recorded_run_gives_the_delays(tmp_path):
    run = recorded(tmp_path, "asp", Cluster(workers=4, compute=Lognormal(0.5, 0.2), slow={2: 3.0}))
    document = answer("--run", run, *GIVEN, "--lr", 0.01)
    facts = {fact["name"]: fact["value"] for fact in document["inputs"]}
    assert facts["workers"] == 4
    assert facts["cycle, s"] == pytest.approx(0.5, rel=0.05)
    assert facts["mean staleness"] == pytest.approx(3.0, rel=0.05)
    assert document["workers"][0]["workers"] == 1


def test_a_run_can_be_asked_about_more_workers_than_it_had(tmp_path):
    run = recorded(tmp_path, "asp", Cluster(workers=2, compute=Lognormal(0.5, 0.2)))
    assert answer("--run", run, "--workers", 6, *GIVEN)["now"]["workers"] == 6


def test_a_cluster_file_gives_the_delays(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('workers = 3\napply_s = 0.01\n[compute]\nkind = "lognormal"\nmean_s = 0.2\n')
    document = answer("--cluster", file, *GIVEN)
    assert document["now"]["delay_s"] == pytest.approx(0.21, rel=0.05)
    shared = answer("--cluster", file, *GIVEN, "--shared-time", 0.1)
    assert shared["now"]["arrivals_per_s"] < document["now"]["arrivals_per_s"]


def test_the_table_shows_what_the_document_says():
    args = ("--workers", 6, "--jitter", 0.2, *GIVEN, "--lr", 0.02, "--target-loss", 0.1)
    shown, document = command(*args), answer(*args)
    assert shown.exit_code == 0
    for text in ("given", "modelled", "stable learning rate", "margin", "error floor", "active workers"):
        assert text in shown.stdout
    assert f"below {document['learning_rate']['critical']:.3g}" in shown.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--workers", "4"], "--recipe FILE"),
        (["--curvature", "1"], "--workers N"),
        (["--workers", "4", "--curvature", "-1"], "--curvature must be > 0, got -1"),
        (["--workers", "4", "--curvature", "1", "--momentum", "1"], "--momentum must be in [0, 1), got 1"),
        (["--workers", "4", "--curvature", "1", "--curvature-min", "2"], "not be above"),
        (["--workers", "4", "--curvature", "1", "--safety", "0"], "--safety"),
        (["--run", "a", "--cluster", "b", "--curvature", "1"], "Give one"),
        (["--workers", "4", "--recipe", "nowhere.py"], "no recipe at nowhere.py"),
    ],
)
def test_mistakes_are_told_in_one_line(args, text):
    result = command(*args)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert text in line


# -- pushes that are triggered -------------------------------------------------------------------


def test_a_share_that_is_pushed_lowers_arrivals_and_the_load_of_what_is_shared():
    whole = answer(*GIVEN, "--workers", 6, "--compute-time", 1, "--shared-time", 0.1, "--lr", 0.001)
    third = answer(
        *GIVEN, "--workers", 6, "--compute-time", 1, "--shared-time", 0.1, "--lr", 0.001,
        "--triggered", 1 / 3,
    )  # fmt: skip
    queue_free = 6 / (0.9 * 3 + 0.1)
    assert whole["now"]["arrivals_per_s"] < 6 / 1.0
    assert third["now"]["arrivals_per_s"] == pytest.approx(queue_free, rel=0.02)
    assert third["learning_rate"]["critical"] == pytest.approx(
        whole["learning_rate"]["critical"] / 3, rel=0.02
    )
    assert third["lockstep"] == whole["lockstep"], "who waits for all pushes every gradient"
    assert any("a push is of 3 gradients" in text for text in third["warnings"])
    assert {"name": "pushed share", "value": pytest.approx(1 / 3), "origin": "given"}.items() <= next(
        fact for fact in third["inputs"] if fact["name"] == "pushed share"
    ).items()


def test_a_share_that_was_recorded_is_read_and_another_one_refused(tmp_path):
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.write(RunStarted(0.0, SCHEMA, "r", "asp", {}, 2, 0, False, "", trigger=1.5))
    for worker in range(2):
        writer.write(WorkerJoined(0.0, worker))
    for number in range(1, 41):
        named = {"fate": "apply", "release": (number % 2,), "staleness": 1, "compute_s": 1.0, "withheld": 3}
        writer.write(Decided(float(number), number, number % 2, number, **named))
    writer.close()
    told = answer(*GIVEN, "--run", tmp_path, "--lr", 0.001)
    share = next(fact for fact in told["inputs"] if fact["name"] == "pushed share")
    assert (share["value"], share["origin"]) == (0.25, "measured")
    assert told["now"]["arrivals_per_s"] == pytest.approx(1.0, rel=0.01), "cycles are those of pushes already"
    refused = command(*GIVEN, "--run", tmp_path, "--triggered", 0.5)
    assert refused.exit_code == 2
    assert "a share of 0.25 was pushed" in refused.output
    assert command(*GIVEN, "--workers", 2, "--triggered", 0).exit_code == 2
