"""What is measured on a recipe, where the truth is known."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ConfigError
from paceline.plan.curvature import measure_shape
from paceline.plan.recipe import load_recipe
from plan.recipes import bowl


def measured(path, **more):
    return measure_shape(load_recipe(path), **more)


def test_the_largest_curvature_is_found(tmp_path):
    shape = measured(bowl(tmp_path, 7.0, 3.0, 1.0, 0.1))
    assert shape.sharpest == pytest.approx(7.0, rel=1e-3)
    assert shape.change < 1e-3


def test_a_crowded_spectrum_is_found_within_a_per_cent(tmp_path):
    spectrum = [10.0 - 0.05 * i for i in range(100)] + [-20.0 + 0.1 * i for i in range(50)]
    assert measured(bowl(tmp_path, *spectrum)).sharpest == pytest.approx(10.0, rel=0.01)


def test_negative_curvature_is_no_obstacle_and_is_not_taken_for_sharpness(tmp_path):
    assert measured(bowl(tmp_path, -9.0, 2.0, 1.0)).sharpest == pytest.approx(2.0, rel=0.02)
    assert measured(bowl(tmp_path, -9.0, -2.0)).sharpest == pytest.approx(0.0, abs=0.05)


def test_a_loss_without_curvature_has_none(tmp_path):
    shape = measured(bowl(tmp_path, 1.0, 1.0, loss="(model.w * (1 + batch[0])).sum(1).mean()"))
    assert shape.sharpest == 0
    assert shape.effective == 0


@pytest.mark.parametrize("batch", [4, 16])
def test_noise_is_the_variance_of_a_batch_gradient(tmp_path, batch):
    shape = measured(bowl(tmp_path, 6.0, 2.0, batch=batch))
    offsets = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
    centres = offsets[: 64 * batch].reshape(64, batch, 2).mean(1)  # gradient = curvature * (w - centre)
    variances = torch.tensor([36.0, 4.0]) * centres.var(0)
    assert shape.noise == pytest.approx(variances.sum().item(), rel=1e-3)
    assert shape.noise_sharpest == pytest.approx(variances[0].item(), rel=1e-2)
    assert shape.batch == batch


def test_slope_and_effective_curvature(tmp_path):
    shape = measured(bowl(tmp_path, 6.0, 2.0, batch=64))
    assert shape.gradient_sq == pytest.approx(12.0**2 + 4.0**2, rel=0.05)
    assert abs(shape.gradient_sharpest) == pytest.approx(12.0, rel=0.05)
    assert shape.loss == pytest.approx(6 / 2 * 5 + 2 / 2 * 5, rel=0.05)
    assert shape.effective == pytest.approx(160 / (2 * 20), rel=0.1)
    assert shape.excess_sharpest == pytest.approx(12.0, rel=0.1)


def test_measuring_after_some_steps_starts_from_there(tmp_path):
    path = bowl(tmp_path, 1.0, 1.0, batch=64)
    before, after = measured(path), measured(path, after=100, lr=0.1)
    assert after.loss < before.loss / 2
    assert after.gradient_sq < 0.05 < before.gradient_sq


def test_measuring_leaves_the_random_numbers_of_the_process_alone(tmp_path):
    path = bowl(tmp_path, 1.0)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    measured(path)
    assert torch.equal(torch.rand(3), expected)


def test_the_same_seed_measures_the_same(tmp_path):
    path = bowl(tmp_path, 5.0, 4.9, 1.0)
    assert measured(path, seed=3) == measured(path, seed=3)


def test_progress_is_told(tmp_path):
    told = []
    measured(bowl(tmp_path, 2.0, 1.0), after=3, lr=0.1, progress=lambda what, share: told.append(what))
    assert list(dict.fromkeys(told)) == ["training", "curvature", "gradient noise"]


def test_the_optimizer_of_a_recipe_is_read_if_it_has_one(tmp_path):
    more = "def optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.3, momentum=0.8)"
    assert load_recipe(bowl(tmp_path, 1.0, more=more)).settings() == {"lr": 0.3, "momentum": 0.8}
    assert load_recipe(bowl(tmp_path, 1.0)).settings() == {}


def test_what_is_wrong_with_a_recipe_is_told_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no recipe at"):
        load_recipe(tmp_path / "nowhere.py")
    empty = tmp_path / "empty.py"
    empty.write_text("def model(): ...\n")
    with pytest.raises(ConfigError, match=r"does not define data\(\) and loss\(\)"):
        load_recipe(empty)
    with pytest.raises(ConfigError, match="raised NameError: name 'nothing'"):
        measured(bowl(tmp_path, 1.0, loss="nothing"))
    with pytest.raises(ConfigError, match="needs a learning rate"):
        measured(bowl(tmp_path, 1.0), after=3)
    with pytest.raises(ConfigError, match="at least 2"):
        measured(bowl(tmp_path, 1.0, batch=4096))
