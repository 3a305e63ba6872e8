"""Row-split layers: one process's numbers for any number of workers, and the costs of the paper's table."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.layers.row_split import RowSplit
from paceline.parallel.pieces import pieces_of
from support.split_layers import Split, split_over, whole


def mlp(*widths: int, norm: bool = False, drop: float = 0.0) -> nn.Sequential:
    rows: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        norms = [nn.BatchNorm1d(outputs)] if norm else []
        rows += [nn.Linear(inputs, outputs), *norms, nn.Tanh(), *([nn.Dropout(drop)] if drop else [])]
    return nn.Sequential(*rows[: -1 - (norm) - (drop > 0)])


class Skips(nn.Module):
    """No chain: what a layer gives goes to several others, whole ones and split ones."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
        self.table = nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) + self.table((x.abs().sum(1) * 10).long() % 5)
        x = x + self.two(torch.tanh(x))
        x = self.norm(x) + self.body(x)
        return x + self.one(x) * 0.5  # the same layer once more


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, **options)
        self.first = nn.Linear(3, 4)
        self.head = nn.Linear(5 * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cells) = self.lstm(self.first(x))
        made: Tensor = self.head(out).sum(1) + hidden.sum() + cells.sum()
        return made


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 3) -> list[float]:
    """A few steps with momentum; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_exact(model: nn.Module, x: Tensor, workers: int, chosen: RowSplit | None = None) -> None:
    """Losses and weights after a few steps, buffers too, are those of one process."""
    model, x = model.double(), x.double()  # so that only the order of sums may differ
    alone = copy.deepcopy(model)
    with torch.no_grad():
        y = torch.randn_like(alone.eval()(x))
    alone.train()
    losses = train(alone, x, y)

    def work(split: Split) -> Any:
        found = train(split.model, x, y)
        state = {name: tensor.detach().clone() for name, tensor in split.model.state_dict().items()}
        return found, pieces_of(split.model), state

    made = split_over(workers, model, work, chosen)
    for found, _, _ in made:
        assert found == pytest.approx(losses, rel=1e-7, abs=1e-9)
    together = whole([pieces for _, pieces, _ in made], [state for _, _, state in made])
    assert together.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-7, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=5),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_network_is_exact_for_any_number_of_workers(
    widths: list[int], workers: int, norm: bool, pair: bool, seed: int
) -> None:
    """Invariant 1, workers that do not divide the widths included; layers with too few outputs stay whole."""
    torch.manual_seed(seed)
    widths[1] += workers  # one at least is wide enough
    check_exact(mlp(*widths, norm=norm), torch.randn(5, widths[0]), workers, RowSplit(pair=pair, smallest=1))


@pytest.mark.parametrize("workers", [2, 3])
def test_convolutions_with_batch_norm_and_pooling_are_exact(workers: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Conv2d(5, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 7),
        nn.Sigmoid(),
        nn.LayerNorm(7),
        nn.Linear(7, 3),
    )
    check_exact(model, torch.randn(4, 1, 8, 8), workers)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_transformer_encoder_evaluates_as_one_process(request: pytest.FixtureRequest) -> None:
    """Without gradients torch would hand the layers' weights to a kernel of its own."""
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x, padded = torch.randn(3, 5, 8).double(), torch.arange(5) >= torch.tensor([[5], [4], [2]])
    with torch.no_grad():
        alone = [model(x), model(x, src_key_padding_mask=padded)[0]]

    @torch.no_grad()
    def work(split: Split) -> list[Tensor]:
        return [split.model(x), split.model(x, src_key_padding_mask=padded)[0]]

    for found in split_over(2, model, work, RowSplit(smallest=1)):
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other)


def test_modules_that_are_no_chain_are_exact() -> None:
    torch.manual_seed(0)
    check_exact(Skips(), torch.randn(4, 6), 3)


@pytest.mark.parametrize(
    "twice", [nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 6)], ids=["relu", "norm", "linear"]
)
@pytest.mark.parametrize("pair", [False, True])
def test_a_module_that_stands_twice_in_a_chain_computes_twice(twice: nn.Module, pair: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), twice, nn.Linear(6, 6), twice, nn.Linear(6, 6), nn.Linear(6, 3))
    check_exact(model, torch.randn(5, 6), 3, RowSplit(pair=pair, smallest=1))


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"num_layers": 2, "bidirectional": True}])
def test_an_lstm_is_exact_with_all_gates_of_a_unit_on_one_worker(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check_exact(Recurrent(**options), torch.randn(3, 4, 3), 3)


def costs_of(model: nn.Module, x: Tensor, workers: int, chosen: RowSplit | None = None) -> list[Any]:
    def work(split: Split) -> Any:
        split.model(x).sum().backward()
        split.costs.stepped()
        owned = sum(p.numel() for p in split.model.parameters())
        return split.costs.predicted, split.costs.measured, owned

    return split_over(workers, model, work, chosen)


@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_and_synchronisations_are_those_of_the_papers_table(workers: int) -> None:
    """Invariants 5 and 6: 2b(M-1)/M of the inner widths and (M-1)/M of the last, in 2L-1 exchanges."""
    widths, batch = (12, 16, 24, 8), 5
    for predicted, measured, owned in costs_of(mlp(*widths), torch.randn(batch, 12), workers):
        numbers = 2 * sum(widths[1:-1]) + widths[-1]
        assert measured.sent_bytes == numbers * batch * 4 * (workers - 1) // workers == predicted.sent_bytes
        assert measured.synchronisations == 2 * 3 - 1 == predicted.synchronisations
        parameters = sum(p.numel() for p in mlp(*widths).parameters())
        assert owned <= -(-parameters // workers)
        assert measured.weight_bytes == predicted.weight_bytes == owned * 4
        weights = 12 * 16 + 16 * 24 + 24 * 8
        assert predicted.multiply_adds == 3 * batch * weights / workers
        unasked = batch * 12 * 16 / workers  # nobody wants the gradient of the data
        assert measured.multiply_adds == predicted.multiply_adds - unasked


@pytest.mark.parametrize(
    ("pair", "numbers", "exchanges"),
    [
        (False, 2 * (16 + 24 + 16) + 8, 7),  # every inner width is gathered, its gradient reduced
        (True, 4 * 24 + 2 * 8, 3),  # sums for everybody: of a pair's outputs, of its input's gradient
    ],
)
def test_costs_of_layers_with_nothing_between_them_are_the_formulas(
    pair: bool, numbers: int, exchanges: int
) -> None:
    widths, batch, workers = (12, 16, 24, 16, 8), 5, 4
    model = nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)))
    chosen = RowSplit(pair=pair, smallest=1)
    for predicted, measured, owned in costs_of(model, torch.randn(batch, 12), workers, chosen):
        assert measured.sent_bytes == numbers * batch * 4 * (workers - 1) // workers == predicted.sent_bytes
        assert measured.synchronisations == exchanges == predicted.synchronisations
        assert measured.weight_bytes == predicted.weight_bytes == owned * 4
        weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
        assert predicted.multiply_adds == 3 * batch * weights / workers


def test_pairing_halves_the_synchronisations() -> None:
    model, x = mlp(12, 16, 24, 16, 8), torch.randn(5, 12)
    plain, paired = (costs_of(model, x, 2, RowSplit(pair=pair, smallest=1))[0] for pair in (False, True))
    assert plain[1].synchronisations == 7
    assert paired[1].synchronisations == 3 == paired[0].synchronisations
    assert paired[1].sent_bytes == paired[0].sent_bytes


@pytest.mark.parametrize("pair", [False, True])
def test_every_worker_s_figures_are_predicted_exactly_for_uneven_blocks(pair: bool) -> None:
    widths, batch, workers = (5, 7, 5, 7, 4), 4, 3
    chosen = RowSplit(pair=pair, smallest=1)
    made = costs_of(mlp(*widths), torch.randn(batch, 5, requires_grad=True), workers, chosen)
    assert len({m.sent_bytes for _, m, _ in made}) > 1, "the blocks are uneven"
    for predicted, measured, owned in made:
        assert predicted.sent_bytes == measured.sent_bytes
        assert predicted.synchronisations == measured.synchronisations
        assert predicted.weight_bytes == pytest.approx(measured.weight_bytes) == owned * 4
        assert predicted.multiply_adds == pytest.approx(measured.multiply_adds)
    if not pair:
        numbers = 2 * (7 + 5 + 7) + 4 + 2 * 5
        assert sum(m.sent_bytes for _, m, _ in made) == numbers * batch * 4 * (workers - 1)


@pytest.mark.parametrize("model", [Skips(), Recurrent(num_layers=2), Recurrent(bidirectional=True)])
def test_costs_of_other_modules_are_predicted_exactly(model: nn.Module) -> None:
    x = torch.randn(4, 6) if isinstance(model, Skips) else torch.randn(3, 4, 3)
    made = costs_of(model, x, 3)
    assert [m.sent_bytes for _, m, _ in made] == [p.sent_bytes for p, _, _ in made]
    assert {m.synchronisations for _, m, _ in made} == {p.synchronisations for p, _, _ in made}


def test_blocks_of_many_uneven_layers_are_as_equal_as_one_row() -> None:
    model = mlp(*[7] * 12)
    owned = [o for _, _, o in costs_of(model, torch.randn(2, 7), 3)]
    assert max(owned) - min(owned) <= 8
    assert sum(owned) == sum(p.numel() for p in model.parameters())


def test_small_layers_and_shared_weights_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    tied = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 16))
    tied[0].weight = tied[2].weight
    cut = split_over(2, model, lambda split: set(pieces_of(split.model)), RowSplit())[0]
    assert cut == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert split_over(2, tied, lambda split: set(pieces_of(split.model)), RowSplit())[0] == {
        "3.weight",
        "3.bias",
    }


def test_a_layer_of_a_chain_refuses_to_be_called_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"apart from the nn\.Sequential"):
        split_over(2, mlp(4, 6, 4), lambda split: split.model[:2](torch.randn(2, 4)))


def test_a_picture_that_is_no_batch_is_refused_and_not_gathered_along_its_height() -> None:
    with pytest.raises(ConfigError, match=r"batches of 4 dimensions, got a tensor of shape \(1, 8, 8\)"):
        split_over(2, nn.Sequential(nn.Conv2d(1, 4, 3)), lambda split: split.model(torch.randn(1, 8, 8)))


def test_nothing_to_split_is_said_with_the_width_that_is_needed() -> None:
    with pytest.raises(ConfigError, match="at least 16 outputs"):
        split_over(2, mlp(4, 6, 4), lambda split: None, RowSplit())


def test_a_model_on_meta_gets_the_weights_of_one_that_was_made_as_ever() -> None:
    torch.manual_seed(3)
    made = mlp(6, 8, 5)
    with torch.device("meta"):
        hollow = mlp(6, 8, 5)

    def work(split: Split) -> Any:
        return pieces_of(split.model), dict(split.model.state_dict())

    torch.manual_seed(3)
    (pieces, state), *_ = split_over(1, hollow, work)
    for name, tensor in whole([pieces], [state]).items():
        assert torch.equal(tensor, made.state_dict()[name])
