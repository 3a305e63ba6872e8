"""Tables in one process: row-wise AdaGrad by hand, what is refused, and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import BadGradient, ConfigError
from paceline.parallel.embedding import EmbeddingTables, RowWiseAdagrad, Table
from paceline.protocols.grid import Grid

ALONE = Grid({"data": 1, "shard": 1})


def tables_of(**more: object) -> EmbeddingTables:
    return EmbeddingTables(ALONE, [Table("a", 6, 2)], dtype=torch.float64, **more)  # type: ignore[arg-type]


def test_duplicates_are_added_up_before_they_are_squared() -> None:
    tables = tables_of()
    optimizer = RowWiseAdagrad(tables.weights, lr=0.5, eps=0.0, moment_scale=4.0)
    tables.trained_by(optimizer)
    before = tables.weights[0].detach().clone()
    out = tables({"a": torch.tensor([[1, 1], [1, 3]])})["a"]
    out.backward(torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    assert tables.weights[0].grad is not None
    assert tables.weights[0].grad.is_sparse
    optimizer.step()
    v = optimizer.state[tables.weights[0]]["sum"]
    assert v.tolist() == [0, (2.0**2 + 3.0**2) / 2, 0, 4.5, 0, 0]
    rate = 0.5 / (v[1] / 4).sqrt()
    torch.testing.assert_close(tables.weights[0][1], before[1] - rate * torch.tensor([2.0, 3.0]).double())
    assert torch.equal(tables.weights[0][[0, 2, 4, 5]], before[[0, 2, 4, 5]])


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_is_torchs_where_every_row_is_looked_up(decoupled: bool) -> None:
    """Tables of one column have a moment for each number, as torch has; decoupled is AdamW's product."""
    tables = EmbeddingTables(ALONE, [Table("a", 6, 1)], dtype=torch.float64)
    plain = nn.Parameter(tables.weights[0].detach().clone())
    ours = RowWiseAdagrad(
        tables.weights, lr=0.5, eps=1e-10, weight_decay=0.2, decoupled_weight_decay=decoupled
    )
    theirs = torch.optim.Adagrad([plain], lr=0.5, eps=1e-10, weight_decay=0.0 if decoupled else 0.2)
    tables.trained_by(ours)
    for step in range(4):
        wanted = torch.linspace(-1.0, step, 6, dtype=torch.float64).unsqueeze(1)
        (tables({"a": torch.arange(6)})["a"] - wanted).square().sum().backward()
        plain.grad = 2 * (plain.detach() - wanted)
        if decoupled:
            plain.data.mul_(1 - 0.5 * 0.2)
        ours.step()
        theirs.step()
        ours.zero_grad()
        torch.testing.assert_close(tables.weights[0], plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decoupled", [False, True])
def test_rows_that_are_not_looked_up_do_not_decay(decoupled: bool) -> None:
    tables = tables_of()
    optimizer = RowWiseAdagrad(tables.weights, weight_decay=0.2, decoupled_weight_decay=decoupled)
    tables.trained_by(optimizer)
    before = tables.weights[0].detach().clone()
    (tables({"a": torch.tensor([2])})["a"].sum() * 0.0).backward()
    optimizer.step()
    assert torch.equal(tables.weights[0][[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    assert bool((tables.weights[0][2].abs() < before[2].abs()).all())


def test_gradients_of_several_batches_are_one_step() -> None:
    some, others = tables_of(), tables_of()
    for tables, batches in ((some, ([1], [1, 4])), (others, ([1, 1, 4],))):
        optimizer = torch.optim.SGD(tables.weights, lr=0.1)
        tables.trained_by(optimizer)
        for ids in batches:
            tables({"a": torch.tensor(ids)})["a"].sum().backward()
        optimizer.step()
    assert torch.equal(some.weights[0], others.weights[0])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda w: torch.optim.Adam(w), "cannot be trained by Adam"),
        (lambda w: torch.optim.Adagrad(w), "cannot be trained by Adagrad"),
        (lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9), "SGD without momentum, got 0.9"),
        (lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.1), "SGD without weight_decay"),
        (lambda w: RowWiseAdagrad([*w, nn.Parameter(torch.ones(2, 2))]), "tables.weights, nothing else"),
        (lambda w: RowWiseAdagrad(w, moment_scale=0.5), "a number >= 1, got 0.5"),
        (lambda w: RowWiseAdagrad(w, weight_decay=-0.1), "weight_decay is a number >= 0, got -0.1"),
    ],
)
def test_other_optimizers_are_refused(optimizer: object, said: str) -> None:
    tables = tables_of()
    with pytest.raises(ConfigError, match=said):
        tables.trained_by(optimizer(tables.weights))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ({"a": torch.tensor([6])}, "id 6 is out of range, it has 6 rows. Use ids from 0 to 5"),
        ({"a": torch.tensor([-1])}, "id -1 is out of range"),
        ({"a": torch.tensor([1.5])}, "int64 or int32"),
        ({"b": torch.tensor([1])}, "given for b, but the tables are a"),
        ({"a": (torch.tensor([1]), torch.tensor([1]))}, "offsets begin at 0"),
    ],
)
def test_ids_that_cannot_be_are_refused(ids: dict[str, torch.Tensor], said: str) -> None:
    tables = tables_of()
    with torch.no_grad(), pytest.raises(ConfigError, match=said):
        tables(ids)


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    tables = tables_of()
    tables.trained_by(torch.optim.SGD(tables.weights, lr=0.1))
    with pytest.raises(BadGradient, match="embedding table"):
        tables({"a": torch.tensor([1])})["a"].backward(torch.full((1, 2), torch.nan, dtype=torch.float64))


def test_tables_that_nobody_trains_and_meshes_without_the_axis_are_refused() -> None:
    with pytest.raises(ConfigError, match="no optimizer trains"):
        tables_of()({"a": torch.tensor([1])})
    with pytest.raises(
        ConfigError, match=r"the mesh is data=2,stage=2\. Use for instance --mesh data=2,shard=2"
    ):
        EmbeddingTables(Grid({"data": 2, "stage": 2}), [Table("a", 6, 2)])
    with pytest.raises(ConfigError, match="k >= 1, got every=0"):
        tables_of(every=0)


def test_state_is_whole_by_table_and_leaves_the_model_parameters_alone() -> None:
    some, others = tables_of(seed=1), tables_of(seed=2)
    for tables in (some, others):
        tables.trained_by(RowWiseAdagrad(tables.weights, lr=0.1))
    some({"a": torch.tensor([2])})["a"].sum().backward()
    some._optimizer.step()  # type: ignore[union-attr]
    assert list(some.parameters()) == []
    state = {name: tensor.clone() for name, tensor in some.state_dict().items()}
    assert {name: tuple(t.shape) for name, t in state.items()} == {"a.weight": (6, 2), "a.sum": (6, 2)}
    others.load_state_dict(state)
    assert torch.equal(others.weights[0], some.weights[0])
    assert torch.equal(others.moments(others.weights[0])["sum"], some.moments(some.weights[0])["sum"])
    with pytest.raises(RuntimeError, match=r"a\.sum"):
        others.load_state_dict({"a.weight": state["a.weight"]})


def test_first_weights_do_not_depend_on_how_a_table_is_split() -> None:
    from paceline.parallel.embedding.arenas import arenas_of, fill
    from paceline.parallel.embedding.planner import place

    for way in ("table", "row", "column"):
        table = Table("a", 5000, 6, sharding=way)  # type: ignore[arg-type]
        placement, found = place([table], 3), torch.zeros(5000, 6)
        for owner in range(3):
            for arena in arenas_of(placement, owner):
                weight = torch.empty(arena.rows, arena.width)
                fill(arena, placement.tables, weight, seed=4)
                for seat in arena.seats:
                    s, at = seat.shard, seat.base
                    found[s.first_row : s.first_row + s.rows, s.first_column : s.first_column + s.columns] = (
                        weight[at : at + s.rows]
                    )
        if way == "table":
            first = found
        assert torch.equal(found, first)
        assert found.unique().numel() > 29_000
