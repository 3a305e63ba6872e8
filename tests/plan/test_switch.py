"""The search for the least share of BSP that is enough, what it costs, and the answers it keeps."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.switch import Key, ShareTrial, SwitchAnswer, Train, keep, recall, script_digest, search


def oracle(accuracy: Callable[[float], float], asp_over_bsp: float = 0.152) -> Train:
    """Every repetition alike; a hybrid run takes as long as its parts."""
    return lambda share, repetition: (accuracy(share), 100 * (share + (1 - share) * asp_over_bsp))


def step(least: float) -> Callable[[float], float]:
    """Accurate from a share on."""
    return lambda share: 0.9 if share >= least else 0.5


def intervals(found: SwitchAnswer) -> list[tuple[float, float]]:
    """The interval after each share tried."""
    low, high, seen = 0.0, 1.0, [(0.0, 1.0)]
    for trial in found.trials[1:]:
        low, high = (low, trial.share) if trial.enough else (trial.share, high)
        seen.append((low, high))
    return seen


@given(least=st.floats(0.001, 1.0), settings=st.integers(1, 8), runs=st.integers(1, 3))
def test_with_a_monotone_oracle_the_answer_is_at_most_one_halving_above_the_least(
    least: float, settings: int, runs: int
) -> None:
    found = search(oracle(step(least)), settings=settings, runs=runs)
    assert 0 <= found.share - least <= 2**-settings
    assert len(found.trials) == 1 + settings
    assert all(len(trial.accuracies) == runs for trial in found.trials)


@given(accuracies=st.lists(st.floats(0, 1), min_size=10, max_size=10), settings=st.integers(1, 6))
def test_the_share_returned_was_enough_and_the_interval_halves_whatever_the_oracle_says(
    accuracies: list[float], settings: int
) -> None:
    answers = iter(accuracies)
    found = search(lambda share, repetition: (next(answers), 1.0), settings=settings, runs=1, tolerance=0.05)
    assert next(t for t in found.trials if t.share == found.share).accuracy >= found.target
    assert [high - low for low, high in intervals(found)] == [2.0**-i for i in range(settings + 1)]
    assert intervals(found)[-1][1] == found.share


def test_if_nothing_less_is_enough_the_answer_is_plain_bsp() -> None:
    found = search(oracle(step(1.0)), settings=5)
    assert (found.share, found.time, found.break_even) == (1.0, 1.0, None)
    assert [trial.share for trial in found.trials] == [1.0, 0.5, 0.75, 0.875, 0.9375, 0.96875]
    assert found.phases == "bsp@1.0,asp"


@pytest.mark.parametrize("diverged", [nan, float("inf"), -float("inf")])
def test_a_run_that_diverged_counts_as_accuracy_zero(diverged: float) -> None:
    found = search(oracle(lambda share: 0.9 if share >= 0.3 else diverged), settings=3, runs=2)
    assert found.share == 0.375
    assert [trial.accuracies for trial in found.trials] == [(0.9, 0.9), (0.9, 0.9), (0.0, 0.0), (0.9, 0.9)]


def test_one_diverged_run_of_several_is_not_forgiven() -> None:
    found = search(lambda share, i: (nan if share < 1 and i == 0 else 0.9, 1.0), settings=2, runs=5)
    assert found.share == 1.0


@pytest.mark.parametrize(("tolerance", "share"), [(0.0, 1.0), (0.02, 0.5), (0.05, 0.25)])
def test_the_tolerance_is_what_may_be_missing(tolerance: float, share: float) -> None:
    accuracies = {1.0: 0.90, 0.5: 0.89, 0.25: 0.86, 0.75: 0.895, 0.375: 0.87, 0.125: 0.8}
    found = search(oracle(accuracies.__getitem__), tolerance=tolerance, settings=2)
    assert found.share == share
    assert found.target == pytest.approx(0.9 - tolerance)


def published(mean: dict[float, float]) -> Train:
    """What the published runs came to, on average."""
    return lambda share, repetition: (mean[share], 1.0)


def test_the_published_averages_lead_to_the_published_shares() -> None:
    cifar100 = {1.0: 0.7462, 0.5: 0.7425, 0.25: 0.7505, 0.125: 0.7460, 0.0625: 0.7325, 0.09375: 0.735}
    assert search(published(cifar100), settings=4).share == 0.125
    cifar10 = {1.0: 0.919, 0.5: 0.920, 0.25: 0.919, 0.125: 0.914, 0.0625: 0.917}
    assert search(published(cifar10), settings=4).share == 0.0625


# -- chance ---------------------------------------------------------------------------------------------


def test_the_search_ends_where_chance_would_decide_and_keeps_what_it_has() -> None:
    rows = {1.0: (0.9, 0.9), 0.5: (0.9, 0.9), 0.25: (0.92, 0.85)}
    found = search(lambda share, i: (rows[share][i], 1.0), settings=5, runs=2)
    assert (found.share, found.ended_by_chance) == (0.5, True)
    assert [trial.enough for trial in found.trials] == [True, True, None]


@pytest.mark.parametrize(
    ("accuracies", "chance"),
    [
        ((0.88, 0.92), True),
        ((0.90, 0.92), False),
        ((0.8, 0.89), False),
        ((0.895, 0.97, 0.97), False),
        ((0.9,), False),
    ],
    ids=["both sides", "all above", "all below", "far enough above", "one run"],
)
def test_chance_is_runs_on_both_sides_with_a_mean_nearer_than_its_error(
    accuracies: tuple[float, ...], chance: bool
) -> None:
    assert ShareTrial(0.5, accuracies, (1.0,) * len(accuracies)).is_chance(0.9) == chance


# -- cost -------------------------------------------------------------------------------------------------


def test_cost_and_break_even_follow_from_the_time_of_runs() -> None:
    found = search(oracle(step(0.05)), settings=2, runs=5)
    c = {share: share + (1 - share) * 0.152 for share in (1.0, 0.5, 0.25)}
    assert found.share == 0.25
    assert found.time == pytest.approx(c[0.25])
    assert found.cost == pytest.approx(5 * (1 + c[0.5] + c[0.25]))
    assert found.break_even == 16  # 9.7 / (1 - 0.364) = 15.25


@pytest.mark.parametrize(("share", "measured"), [(0.05, 0.195), (0.5, 0.58)])
def test_a_hybrid_run_takes_the_published_time(share: float, measured: float) -> None:
    bsp, hybrid = (oracle(step(0.0))(each, 0)[1] for each in (1.0, share))
    assert hybrid / bsp == pytest.approx(measured, abs=0.005)


@pytest.mark.parametrize(
    "asked", [{"tolerance": -0.1}, {"tolerance": nan}, {"settings": 0}, {"runs": 0}], ids=str
)
def test_a_search_that_cannot_be_made_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(asked))):
        search(oracle(step(0.5)), **asked)


# -- answers that are kept ------------------------------------------------------------------------------

FOUND = search(oracle(step(0.2)), settings=3, runs=2)
KEY = Key("abc", ("--epochs", "3"), 4, {"slow": {"3": 2.5}}, {"seed": 0, "tolerance": 0.01})


def test_an_answer_is_kept_for_the_same_job_and_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "tuned.json"
    assert recall(path, KEY) is None
    keep(path, KEY, FOUND)
    assert recall(path, KEY) == FOUND
    others: list[dict[str, Any]] = [
        {"script": "abd"},
        {"args": ("--epochs", "4")},
        {"workers": 5},
        {"cluster": {"slow": {"3": 2.0}}},
        {"dials": {"seed": 0, "tolerance": 0.02}},
    ]
    for other in others:
        assert recall(path, msgspec.structs.replace(KEY, **other)) is None


def test_answers_for_several_jobs_are_kept_side_by_side(tmp_path: Path) -> None:
    path, other = tmp_path / "tuned.json", msgspec.structs.replace(KEY, workers=8)
    keep(path, KEY, FOUND)
    keep(path, other, msgspec.structs.replace(FOUND, share=0.5))
    assert recall(path, KEY) == FOUND
    answer = recall(path, other)
    assert answer is not None
    assert answer.share == 0.5
    assert list(tmp_path.iterdir()) == [path]


def test_the_order_in_which_a_key_was_written_does_not_matter() -> None:
    turned = msgspec.structs.replace(KEY, dials=dict(reversed(KEY.dials.items())))
    assert turned.digest == KEY.digest


def test_a_script_that_changed_is_another_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("lr = 0.1")
    before = script_digest(script)
    assert script_digest(script) == before
    script.write_text("lr = 0.2")
    assert script_digest(script) != before


def test_a_file_that_is_something_else_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"tuned\.json is not a file of tuning results"):
        recall(path, KEY)
