"""Scripts' models become graphs, whatever way they are written; what would go wrong in silence is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.plan.hap.trace import Unplanned, by_position, trace
from support.hap_models import Residual, Tied


class Written(nn.Module):
    """A linear layer, and what a test makes of it."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.layer, self.other, self.body = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x: Tensor, more: Tensor | None = None, scale: float = 1.0) -> Any:
        return self.body(self, x, more, scale)


X = torch.ones(6, 4)


def test_asserts_sizes_and_arguments_that_are_none_are_those_of_the_call() -> None:
    ids = torch.zeros(3, 6, dtype=torch.long)
    traced = trace(Tied(), (ids,))
    assert (traced.place, traced.plain_args, traced.others[1]) == (0, (None, None), None)
    assert not traced.graph.loss
    assert not traced.graph.notes
    assert {node.op for node in traced.graph.nodes} >= {"elementwise", "einsum", "embedding", "dropout"}


def test_of_several_results_the_loss_is_planned_and_the_others_cannot_be_used() -> None:
    ids = torch.zeros(3, 6, dtype=torch.long)
    traced = trace(Tied(), (ids, ids))
    assert traced.place == 1
    assert traced.graph.loss
    with pytest.raises(ConfigError, match="only the loss is planned"):
        traced.others[0].argmax(-1)
    with pytest.raises(ConfigError, match="only the loss is planned"):
        torch.softmax(Unplanned(), -1)  # type: ignore[arg-type]


def test_batch_norm_adds_its_statistics_up_and_is_no_piece() -> None:
    graph = trace(Residual(), (torch.ones(4, 3, 8, 8),)).graph
    assert not graph.notes
    assert [n.attrs["sums"] for n in graph.nodes if n.op == "batch_norm"] == [24, 24]


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Residual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model, (torch.ones(4, 3, 8, 8),))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_branch_on_data_makes_its_module_one_piece_and_says_where() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), Branches(), nn.Linear(4, 4))
    graph = trace(model, (X,)).graph
    assert any(note.startswith("1 is planned as one piece") for note in graph.notes)
    with pytest.raises(ConfigError, match="the model's own forward cannot be traced"):
        trace(Branches(), (X,))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda m, x, *_: m.layer(x + torch.rand(6, 4)), "draws random numbers"),
        (lambda m, x, *_: (m.layer(x), m.other(x)), "returns something else than one tensor"),
        (lambda m, x, *_: {"scores": m.layer(x)}, "returns something else than one tensor"),
    ],
)
def test_what_cannot_be_planned_is_refused(body: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        trace(Written(body), (X,))


def test_a_tensor_that_is_used_after_it_was_changed_in_place_is_refused() -> None:
    def changes(m: Any, x: Tensor, *_: Any) -> Tensor:
        y = m.layer(x)
        view = y.view(3, 8)
        y.relu_()
        return m.other(view.view(6, 4))

    with pytest.raises(ConfigError, match="is used again after relu_ has changed it in place"):
        trace(Written(changes), (X,))
    assert trace(Written(lambda m, x, *_: m.other(m.layer(x).relu_())), (X,)).graph.nodes


def test_named_arguments_are_put_in_order_and_tensors_in_lists_are_refused() -> None:
    model = Written(lambda m, x, more, scale: m.layer(x + more) * scale)
    assert by_position(model.forward, (X,), {"scale": 2.0, "more": X})[2] == 2.0
    graph = trace(model, (X, X, 2.0)).graph
    assert [node.name for node in graph.nodes if node.op == "input"] == ["x", "more"]
    with pytest.raises(ConfigError, match="is called with a list"):
        by_position(model.forward, ([X],), {})


def test_several_results_of_a_module_are_picked() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out, (last, _) = self.cells(x)
            return self.head(out[:, -1] + last[-1])

    graph = trace(Reads(), (torch.ones(6, 3, 4),)).graph
    assert next(node.op for node in graph.nodes if node.name.startswith("getitem")) == "samples"
    assert any("cells is planned as one piece" in note for note in graph.notes)
