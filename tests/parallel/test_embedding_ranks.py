"""2D sparse parallelism on four real processes: the invariants that are about numbers."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.parallel.plans.processes import run_ranks
from support.embedding_ranks import moments, whole
from support.embeddings import Case, first_weights, ids_of, one_process, places, pooled, reference

TESTS = str(Path(__file__).parents[1])
RANKS = 4
MESHES = ({"data": 1, "shard": 4}, {"data": 2, "shard": 2}, {"shard": 2, "data": 2}, {"data": 4, "shard": 1})
WAYS = ("table", "row", "column")


def tables(way: str) -> list[dict[str, Any]]:
    """Rows that do not divide, widths that differ, both poolings, and one table that any way can have."""
    return [
        {"name": "a", "rows": 13, "width": 8, "pooling": "mean", "sharding": way},
        {"name": "b", "rows": 7, "width": 8, "sharding": way},
        {"name": "c", "rows": 9, "width": 4, "sharding": "row" if way == "column" else way},
    ]


def all_cases() -> dict[str, Case]:
    made = {f"sgd {way} {axes}": Case(dict(axes), tables(way)) for way in WAYS for axes in MESHES}
    two, one = Case(MESHES[1], tables("row"), "adagrad", steps=4), MESHES[0]
    made |= {f"adagrad {axes}": replace(two, axes=dict(axes)) for axes in MESHES}
    made["by columns"] = replace(two, tables=tables("column")[:2])
    made["scaled"] = replace(two, moment_scale="groups")
    made["delayed"] = replace(two, delay=True, moment_scale=2.0)
    made["equal groups"] = replace(two, pattern="equal", axes=dict(MESHES[1]))
    made["one group"] = replace(two, pattern="one", linear=True, tables=tables("table"))
    made["one group, all shards"] = replace(made["one group"], axes=dict(one), moment_scale=1.0)
    made["delayed once"] = replace(two, delay=True, linear=True, steps=5)
    made["one group, delayed"] = replace(two, axes=dict(one), delay=True, every=2, steps=5)
    made["decayed"] = replace(two, weight_decay=0.3, moment_scale=2.0)
    made["decayed by itself"] = replace(made["decayed"], decoupled_weight_decay=True, delay=True)
    made["every 3"] = replace(two, every=3, steps=7)
    made["every 3, sgd"] = replace(two, optimizer="sgd", every=3, steps=5)
    made["never"] = replace(two, every=1000)
    made["at last"] = replace(two, every=1000, at_last=True)
    made["no ids"] = replace(two, pattern="none", steps=2)
    made["uneven"] = Case(MESHES[1], tables("row"), pattern="uneven")
    return made


CASES = all_cases()


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Any]]:
    """Of each case what each rank has."""
    request = {"cases": [asdict(case) for case in CASES.values()]}
    answers = run_ranks(
        "support.embedding_ranks:everything", RANKS, request, timeout_s=100, paths=(TESTS,), forked=True
    )
    return {name: [answer[number] for answer in answers] for number, name in enumerate(CASES)}


def close(some: dict[int, Tensor], others: dict[int, Tensor], within: float = 1e-12) -> None:
    assert some.keys() == others.keys()
    for index, each in some.items():
        torch.testing.assert_close(each, others[index], rtol=within, atol=within)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_sgd_equals_one_process_on_the_mean_gradient_for_any_mesh_and_sharding(
    trained: dict[str, list[Any]], axes: dict[str, int], way: str
) -> None:
    """Invariant 2, and of 7 that training is equal."""
    name = f"sgd {way} {axes}"
    for group in range(axes.get("data", 1)):
        close(whole(trained[name], group), one_process(CASES[name]).weights)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_an_embedding_bag_for_any_sharding(
    trained: dict[str, list[Any]], axes: dict[str, int], way: str
) -> None:
    """Invariant 7."""
    case = CASES[f"sgd {way} {axes}"]
    for answer in trained[f"sgd {way} {axes}"]:
        ids, _ = ids_of(case, 0, answer["place"])
        for name, each in pooled(case, first_weights(case), ids).items():
            torch.testing.assert_close(
                torch.tensor(answer["outputs"][0][name]).double(), each, rtol=1e-6, atol=1e-7
            )


def test_one_group_is_model_parallel_and_never_synchronises(trained: dict[str, list[Any]]) -> None:
    """Invariant 1: G = 1, for row-wise AdaGrad too."""
    name = f"adagrad {MESHES[0]}"
    full = one_process(CASES[name])
    close(whole(trained[name]), full.weights)
    close(moments(trained[name]), {index: v.squeeze(1) for index, v in full.v.items()})
    assert all(call[0] == "all_to_all_single" for answer in trained[name] for call in answer["calls"])


def test_groups_of_one_are_data_parallel_with_averaged_weights(trained: dict[str, list[Any]]) -> None:
    """Invariant 1: L = 1."""
    name = f"adagrad {MESHES[3]}"
    close(whole(trained[name]), reference(CASES[name])[0].weights)
    assert all(call[0] != "all_to_all_single" for answer in trained[name] for call in answer["calls"])


@pytest.mark.parametrize(
    "name",
    [
        f"adagrad {MESHES[1]}",
        f"adagrad {MESHES[2]}",
        "scaled",
        "delayed",
        "one group, delayed",
        "decayed",
        "decayed by itself",
        "every 3",
        "every 3, sgd",
        "never",
        "at last",
    ],
)
def test_every_setting_is_what_dense_tables_and_the_written_out_formulas_give(
    trained: dict[str, list[Any]], name: str
) -> None:
    for group, copy in enumerate(reference(CASES[name])):
        close(whole(trained[name], group), copy.weights)
        if CASES[name].optimizer == "adagrad":
            close(moments(trained[name], group), {index: v.squeeze(1) for index, v in copy.v.items()})


@pytest.mark.parametrize("name", [f"adagrad {MESHES[1]}", "delayed", "at last", "uneven"])
def test_after_a_synchronisation_all_copies_are_equal_bit_for_bit(
    trained: dict[str, list[Any]], name: str
) -> None:
    """Invariant 3."""
    for first in trained[name]:
        for other in trained[name]:
            if first["place"]["shard"] == other["place"]["shard"]:
                assert first["pieces"] == other["pieces"]


def test_between_synchronisations_copies_differ_only_in_rows_touched_since(
    trained: dict[str, list[Any]],
) -> None:
    """Invariant 3: in `every 3` one step has been made since."""
    case, answers = CASES["every 3"], trained["every 3"]
    some, others = whole(answers, 0), whole(answers, 1)
    differ = 0
    for index, table in enumerate(case.tables):
        touched = set()
        for place in places(case.axes):
            touched |= set(ids_of(case, case.steps - 1, place)[0][table["name"]][0].tolist())
        apart = set(torch.nonzero((some[index] != others[index]).any(1)).flatten().tolist())
        assert apart <= touched
        differ += len(apart)
    assert differ, "copies that never differ prove nothing"


def test_rows_that_are_never_looked_up_never_change(trained: dict[str, list[Any]]) -> None:
    """Invariant 4: the last row of each table is no id of any case."""
    for name, case in CASES.items():
        for group in range(case.axes.get("data", 1)):
            for index, weight in whole(trained[name], group).items():
                assert torch.equal(weight[-1], first_weights(case)[index][-1])
        if case.optimizer == "adagrad" and name != "by columns":
            assert all(v[-1] == 0 for v in moments(trained[name]).values())


def test_a_row_that_one_group_has_touched_in_each_step_has_g_times_the_moment(
    trained: dict[str, list[Any]],
) -> None:
    """Invariant 5, first half; gradients do not depend on weights here."""
    full = one_process(CASES["one group"])
    close(moments(trained["one group"]), {index: 2 * v.squeeze(1) for index, v in full.v.items()})
    assert any(bool(v.any()) for v in full.v.values())


def test_groups_with_equal_gradients_are_full_model_parallel(trained: dict[str, list[Any]]) -> None:
    """Invariant 5, second half, with c = 1."""
    full = one_process(CASES["equal groups"])
    close(whole(trained["equal groups"]), full.weights)
    close(moments(trained["equal groups"]), {index: v.squeeze(1) for index, v in full.v.items()})


def test_with_a_shared_moment_the_mean_of_updates_is_the_update_with_the_mean_gradient(
    trained: dict[str, list[Any]],
) -> None:
    """Invariant 6: the last step of `delayed once`, for rows that all copies had a moment for."""
    from support.embeddings import mean_gradient

    case = CASES["delayed once"]
    before = reference(replace(case, steps=case.steps - 1))[0]
    gradient = mean_gradient(case, before.weights, case.steps - 1)
    after = whole(trained["delayed once"])
    for index, g in gradient.items():
        known = before.v[index].squeeze(1) > 0
        rate = case.lr / (before.v[index].sqrt() + 1e-8)
        torch.testing.assert_close(after[index][known], (before.weights[index] - rate * g)[known])
        assert known.any()


def test_columns_have_moments_of_their_own(trained: dict[str, list[Any]]) -> None:
    """Invariant 7: v is per row and block of columns, so training differs from that of whole rows."""
    case = CASES["by columns"]
    close(whole(trained["by columns"]), reference(case, blocks=2)[0].weights)
    with pytest.raises(AssertionError):
        close(whole(trained["by columns"]), reference(case, blocks=1)[0].weights)


@pytest.mark.parametrize("name", [f"adagrad {axes}" for axes in MESHES[:3]])
def test_ids_and_sums_go_inside_groups_and_weights_between_copies(
    trained: dict[str, list[Any]], name: str
) -> None:
    """Invariant 8; who averages the rest of a model over all is tested with runs."""
    axes = CASES[name].axes
    order = list(axes)
    for answer in trained[name]:
        for operation, ranks in answer["calls"]:
            axis = "shard" if operation == "all_to_all_single" else "data"
            assert len(ranks) == axes[axis]
            stride = axes[order[1]] if axis == order[0] else 1
            assert [b - a for a, b in pairwise(ranks)] == [stride] * (len(ranks) - 1)


def test_copies_are_synchronised_once_in_k_steps(trained: dict[str, list[Any]]) -> None:
    """Invariant 9."""
    for name, syncs in (("every 3", 2), ("never", 0), ("at last", 1), (f"adagrad {MESHES[1]}", 4)):
        assert {answer["syncs"] for answer in trained[name]} == {syncs}
    assert not any(call[0] == "all_reduce" for answer in trained["never"] for call in answer["calls"])


def test_uneven_batches_count_by_their_samples(trained: dict[str, list[Any]]) -> None:
    close(whole(trained["uneven"]), one_process(CASES["uneven"]).weights)


def test_batches_without_ids_change_nothing(trained: dict[str, list[Any]]) -> None:
    close(whole(trained["no ids"]), first_weights(CASES["no ids"]), within=0.0)
    assert {answer["syncs"] for answer in trained["no ids"]} == {2}


def test_no_dense_gradient_is_ever_made(trained: dict[str, list[Any]]) -> None:
    assert not any(flag for answers in trained.values() for answer in answers for flag in answer["dense"])


def test_bytes_of_sums_are_the_formulas(trained: dict[str, list[Any]]) -> None:
    """B F D (L - 1) / L there and as much back, on the mean of a group, besides the ids."""
    case = CASES[f"sgd table {MESHES[0]}"]
    sums = sum(case.batch * table["width"] * 8 * 3 for table in case.tables) * 2 * case.steps
    sent = sum(answer["sent"]["shard"] for answer in trained[f"sgd table {MESHES[0]}"])
    heads = RANKS * (RANKS - 1) * case.steps * 8 * 2  # the batch's size, and the ids of the owner's arena
    ids = sum(
        4 * (len(each[0]) + case.batch)
        for step in range(case.steps)
        for place in places(case.axes)
        for each in ids_of(case, step, place)[0].values()
    )
    assert sums < sent <= sums + heads + ids
