"""Recipes that train are sound as data, and what is read off a course is what it says. Without processes."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.parallel.registry import make_split
from paceline.protocols.settings import make_any
from paceline.sim.toml import load_cluster
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.kept import read_kept
from paceline_bench.papers.papers import TRIED
from paceline_bench.papers.recipe import Figure, as_good, better, between, beyond, close, gains, level, up_to
from paceline_bench.papers.split_body import CUTS, NETWORKS
from paceline_bench.papers.training import Trained, TrialTrainer
from paceline_bench.papers.trial import Course, Side, SplitSide, Trial, TrialRun, sooner
from paceline_bench.strategies.runs.models import Residual

NAMES = [name for name, recipe in TRIED.items() if recipe.trial is not None]


def silent(text: str) -> None:
    pass


def course(*accuracies: float, diverged: bool = False) -> Course:
    seen = [(float(at), 10 * at, accuracy) for at, accuracy in enumerate(accuracies, 1)]
    return Course(seen=seen, seconds=float(len(seen)), samples=10 * len(seen), diverged=diverged)


@pytest.mark.parametrize("name", NAMES)
def test_every_side_names_a_protocol_with_its_settings_and_a_cluster_of_as_many_workers(
    name: str, tmp_path: Path
) -> None:
    trial = TRIED[name].trial
    assert trial is not None
    for side in trial.sides.values():
        work = trial.work(side, 0, BenchPlan())
        if isinstance(side, SplitSide):
            make_split(side.protocol, side.settings)
            continue
        make_any(side.protocol, side.settings)
        (tmp_path / "cluster.toml").write_text(work.cluster)
        assert load_cluster(tmp_path / "cluster.toml").workers == work.workers


@pytest.mark.parametrize("name", NAMES)
def test_what_courses_come_to_are_the_figures_of_the_rule_and_numbers(name: str) -> None:
    recipe = TRIED[name]
    assert recipe.trial is not None
    assert recipe.judged is not None
    for each in (course(*[0.5 + 0.03 * step for step in range(12)]), course(0.1, 0.1, 0.1, diverged=True)):
        figures = recipe.judged(dict.fromkeys(recipe.trial.sides, each))
        assert list(figures) == [figure.name for figure in recipe.figures]
        assert all(abs(value) < inf for value in figures.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_judged_figure_on_which_accuracy_has_no_influence_is_called_computed(name: str) -> None:
    """Seconds and bytes of these runs are those of a cluster that was chosen."""
    recipe = TRIED[name]
    assert recipe.trial is not None
    assert recipe.judged is not None
    sides = [*recipe.trial.sides]
    seen: dict[str, set[float]] = {figure.name: set() for figure in recipe.figures}
    for turn in range(len(sides) + 1):
        runs = {
            side: course(
                *[0.1 + 0.07 * ((at + turn) % (len(sides) + 1)) / len(sides) * step for step in range(12)]
            )
            for at, side in enumerate(sides)
        }
        for figure, value in recipe.judged(runs).items():
            seen[figure].add(value)
    for figure in recipe.figures:
        if figure.reproduced is not None and len(seen[figure.name]) == 1:
            assert figure.computed, figure.name


@pytest.mark.parametrize("name", NAMES)
def test_no_two_sides_of_a_trial_are_the_same_run(name: str) -> None:
    trial = TRIED[name].trial
    assert trial is not None
    keys = [trial.work(side, 0, BenchPlan()).key for side in trial.sides.values()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", NAMES)
def test_a_push_is_said_to_be_a_whole_step_only_where_it_is_one_for_some_side(name: str) -> None:
    recipe = TRIED[name]
    assert recipe.trial is not None
    whole = any(side.weighting == "sum" for side in recipe.trial.sides.values())
    assert whole or "whole step" not in recipe.setup + recipe.explained


@pytest.mark.parametrize("name", ["layerwise_accuracy", "ddl_sgs"])
def test_delays_are_judged_on_a_network_with_ways_around_its_blocks_as_the_papers_have(name: str) -> None:
    trial, (judged, *_) = TRIED[name].trial, TRIED[name].figures
    assert trial is not None
    assert TRIED[name].judged is not None
    sides = {side for side, each in trial.sides.items() if "--network=residual" in each.args}  # type: ignore[attr-defined]
    worse = {side: course(*[0.5] * 3) for side in trial.sides} | {"bp": course(*[0.9] * 3)}
    assert judged.reproduced is not None
    assert {"bp", "layerwise", "fdg"} <= sides
    assert TRIED[name].judged(worse)[judged.name] == pytest.approx(-40)  # type: ignore[misc]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_split_models_are_cut_into_as_many_stages_and_only_one_is_residual(name: str) -> None:
    model, pixels = NETWORKS[name](0), torch.randn(3, 64)
    around = [each for each in model.modules() if isinstance(each, Residual)]
    assert len(around) == {"residual": 8, "row": 0}[name]
    assert model(pixels).shape == (3, 10)
    for stages, cuts in CUTS[name].items():
        assert len(cuts) == stages - 1
        assert all(0 < cut < len(model) for cut in cuts)
    assert not any(isinstance(each, nn.BatchNorm2d) for each in model.modules())


def test_accuracy_is_that_of_three_measurements_and_a_run_that_diverged_guesses() -> None:
    assert course(0.1, 0.3, 0.5, 0.7).final == pytest.approx(0.5)
    assert course(0.9, 0.9, 0.9, diverged=True).final == 0.1
    assert course(0.3, 0.6, 0.9, 0.9).to(0.6) == 3.0
    assert course(0.3, 0.6, 0.9, 0.9).to(0.95) == inf
    assert course(0.6, 0.6).at(1.5) == pytest.approx(0.6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 20))
def test_accuracy_over_time_lies_between_the_lowest_and_the_highest(seen: list[float], until: int) -> None:
    mean = course(*seen).mean_until(float(until))
    assert min(*seen, 0.1) - 1e-9 <= mean <= max(*seen, 0.1) + 1e-9


def test_who_never_gets_there_is_not_sooner_and_when_the_other_gave_up_is_no_figure() -> None:
    fast, slow, never = course(0.9, 0.9), course(0.1, 0.1, 0.1, 0.9, 0.9, 0.9), course(0.1, 0.1, 0.1, 0.1)
    diverged = course(0.1, diverged=True)
    assert sooner(slow, fast, 0.9) == pytest.approx(6.0)
    assert (sooner(fast, never, 0.9), sooner(diverged, never, 0.9)) == (0.0, 0.0)
    assert (sooner(never, fast, 0.9), sooner(diverged, slow, 0.9)) == (inf, inf)


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (close("f", 2.0), "partly"),
        (close("f", 0.5), "not"),
        (between("f", 4, 8), "partly"),
        (level("f"), "not"),
        (up_to("f", 10, inputs="paper's"), "partly"),
        (beyond("f", "faster"), "reproduced"),
    ],
)
def test_a_rule_with_an_upper_end_does_not_take_what_was_never_reached_for_reproduced(
    figure: Figure, verdict: str
) -> None:
    given_up_late = sooner(course(*[0.1] * 5), course(0.1, 0.1, 0.1, 0.9, 0.9, 0.9), 0.9)
    assert figure.by_rule(given_up_late) == verdict


def test_more_workers_that_never_get_there_do_harm_and_one_that_never_does_is_no_proof_of_none() -> None:
    recipe, name = TRIED["sdde"], "samples to it: 2 workers / 1"
    assert recipe.trial is not None
    assert recipe.judged is not None
    fast, never = course(*[0.9] * 5), course(*[0.1] * 5)
    runs = dict.fromkeys(recipe.trial.sides, fast)
    figures = [recipe.judged(runs | {side: never})[name] for side in ("2", "1")]
    (figure,) = (each for each in recipe.figures if each.name == name)
    assert figures == [inf, 0.0]
    assert {figure.by_rule(value) for value in figures} == {"not"}


def paced(*steps_s: float) -> Course:
    """Equally good, measured after every fifth step."""
    seen = [(sum(steps_s[:done]), 8 * done, 0.9) for done in range(5, len(steps_s) + 1, 5)]
    return Course(seen=seen, seconds=sum(steps_s), samples=8 * len(steps_s))


def test_selsync_is_judged_by_all_its_time_and_its_window_is_25_steps() -> None:
    recipe = TRIED["selsync"]
    assert recipe.trial is not None
    assert recipe.judged is not None
    bsp, ours = paced(*[2.0] * 50), paced(*[2.0] * 30, *[0.1] * 20)
    figures = recipe.judged(dict.fromkeys(recipe.trial.sides, ours) | {"bsp": bsp})
    whole = "BSP / SelSync, whole run, the best delta within 1 point"
    after = "after its window: BSP / SelSync, the best delta within 1 point"
    judged = {figure.name for figure in recipe.figures if figure.reproduced is not None}
    assert figures[whole] == pytest.approx(100 / 62)
    assert figures[after] == pytest.approx(50 / 12)
    assert judged & {whole, after} == {whole}


@pytest.mark.parametrize("name", NAMES)
def test_on_images_sides_train_as_many_times_longer_than_each_other_as_on_digits(name: str) -> None:
    trial = TRIED[name].trial
    assert trial is not None
    for side in trial.sides.values():
        if isinstance(side, SplitSide):
            continue
        few, many = (
            int(args[args.index("--epochs") + 1])
            for args in (trial.work(side, 0, BenchPlan(data=data)).args for data in (None, "cifar"))
        )
        assert many / few == pytest.approx(trial.image_epochs / trial.epochs, rel=0.1)
        assert f"CIFAR-10, {trial.image_epochs} epochs" in TRIED[name].setup


@pytest.mark.parametrize(
    ("figure", "verdicts"),
    [
        (as_good("f"), {-3.1: "not", -2.0: "partly", -0.9: "reproduced", 5.0: "reproduced"}),
        (better("f"), {0.0: "not", 0.5: "partly", 1.0: "reproduced"}),
        (gains("f", 2.4), {0.2: "not", 0.3: "partly", 1.2: "reproduced", 4.8: "reproduced", 4.9: "partly"}),
        (gains("f", 2.4, high=4.8), {1.1: "partly", 1.2: "reproduced", 9.6: "reproduced", 9.7: "partly"}),
        (
            gains("f", -2.0),
            {-0.1: "not", -0.5: "partly", -1.0: "reproduced", -4.0: "reproduced", -60: "partly"},
        ),
    ],
)
def test_differences_in_points_are_judged_as_the_rule_says(
    figure: Figure, verdicts: dict[float, str]
) -> None:
    assert {value: figure.by_rule(value) for value in verdicts} == verdicts


class Pretended(TrialTrainer):
    """Learns best at rate 2, and counts its runs."""

    runs = 0

    def _run(self, work: TrialRun) -> Course:
        self.runs += 1
        rate = float(work.args[work.args.index("--lr") + 1])
        return course(1.0 - abs(rate - 2.0) / 10)


def tried(side: Side, plan: BenchPlan, known: list[Trained]) -> tuple[dict[str, list[float]], int]:
    trial = Trial(cluster="workers = 1", workers=1, sides={"x": side}, lr=9.0, rates=(1, 2, 3), epochs=1)
    with Pretended(plan, silent, known) as trainer:
        return trainer.values(trial, lambda runs: {"final": runs["x"].final}), trainer.runs


def test_the_first_seed_chooses_the_rate_and_the_other_seeds_keep_it() -> None:
    assert tried(Side(protocol="bsp"), BenchPlan(), []) == ({"final": [1.0, 1.0, 1.0]}, 5)
    fixed = Side(protocol="bsp", lr=3.0)
    assert tried(fixed, BenchPlan(), []) == ({"final": [0.9, 0.9, 0.9]}, 3)


def test_a_run_that_is_kept_is_not_made_again(tmp_path: Path) -> None:
    plan = BenchPlan(results=str(tmp_path / "kept.jsonl"))
    first, made = tried(Side(protocol="bsp"), plan, [])
    kept = read_kept(tmp_path / "kept.jsonl", Trained)
    assert len(kept) == made
    assert tried(Side(protocol="bsp"), plan, kept) == (first, 0)
    assert tried(Side(protocol="asp"), plan, kept)[1] == made
