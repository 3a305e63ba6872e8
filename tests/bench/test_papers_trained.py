"""Recipes that train are sound as data, and what is read off a course is what it says. Without processes."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.harness.plan import BenchPlan
from paceline.bench.kept import read_kept
from paceline.bench.papers.papers import TRIED
from paceline.bench.papers.recipe import Figure, as_good, better, gains
from paceline.bench.papers.training import Trained, TrialTrainer
from paceline.bench.papers.trial import Course, Side, SplitSide, Trial, TrialRun, sooner
from paceline.parallel.registry import make_split
from paceline.protocols.settings import make_any
from paceline.sim.toml import load_cluster

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
def test_no_two_sides_of_a_trial_are_the_same_run(name: str) -> None:
    trial = TRIED[name].trial
    assert trial is not None
    keys = [trial.work(side, 0, BenchPlan()).key for side in trial.sides.values()]
    assert len(set(keys)) == len(keys)


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


def test_who_never_gets_there_is_not_sooner_and_who_waits_in_vain_counts_to_its_end() -> None:
    fast, slow, never = course(0.9, 0.9), course(0.1, 0.1, 0.1, 0.9, 0.9, 0.9), course(0.1, 0.1, 0.1, 0.1)
    assert sooner(slow, fast, 0.9) == pytest.approx(6.0)
    assert sooner(fast, never, 0.9) == 0.0
    assert sooner(never, fast, 0.9) == 4.0


@pytest.mark.parametrize(
    ("figure", "verdicts"),
    [
        (as_good("f"), {-3.1: "not", -2.0: "partly", -0.9: "reproduced", 5.0: "reproduced"}),
        (better("f"), {0.0: "not", 0.5: "partly", 1.0: "reproduced"}),
        (gains("f", 2.4), {0.2: "not", 0.3: "partly", 1.2: "reproduced", 9.0: "reproduced"}),
        (gains("f", -2.0), {0.5: "not", -0.1: "not", -0.5: "partly", -1.0: "reproduced"}),
    ],
)
def test_differences_in_points_are_judged_as_the_rule_says(
    figure: Figure, verdicts: dict[float, str]
) -> None:
    assert {value: figure.verdict(value) for value in verdicts} == verdicts


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
