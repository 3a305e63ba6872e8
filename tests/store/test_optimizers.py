"""A torch optimizer taken apart, rebuilt elsewhere, and its state saved and put back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.store.optimizers import (
    OptimizerSpec,
    adjust,
    apply_settings,
    build_optimizer,
    describe_optimizer,
    export_state,
    group_settings,
    import_state,
)

MAKE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.5},
    "Adadelta": {"lr": 1.0},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3, dtype=torch.float64)), nn.Parameter(torch.randn(3).double())]


def taken_apart(optimizer: torch.optim.Optimizer, owned: list[nn.Parameter]) -> OptimizerSpec:
    """As the store receives it: through bytes."""
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(owned)})
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=OptimizerSpec)


def step(optimizer: torch.optim.Optimizer, owned: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in owned:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    optimizer.step()


def assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_the_rebuilt_optimizer_makes_the_same_steps(name: str, fast: bool) -> None:
    original, copy = parameters(), parameters()
    mine = getattr(torch.optim, name)([{"params": original[:1]}, {"params": original[1:]}], **MAKE[name])
    rebuilt = build_optimizer(taken_apart(mine, original), list(copy), fast)
    for seed in range(4):
        step(mine, original, seed)
        step(rebuilt, copy, seed)
    assert_same(copy, original)


@pytest.mark.parametrize("name", MAKE)
def test_exported_state_put_back_goes_on_as_if_nothing_had_happened(name: str) -> None:
    original, copy = parameters(), parameters()
    mine = getattr(torch.optim, name)(original, **MAKE[name])
    for seed in range(3):
        step(mine, original, seed)
    tensors, values = export_state(mine)
    rebuilt = build_optimizer(taken_apart(mine, original), list(copy), fast=True)
    for p, q in zip(copy, original, strict=True):
        p.data.copy_(q)
    import_state(rebuilt, tensors, msgspec.json.decode(msgspec.json.encode(values)))
    for seed in range(3, 6):
        step(mine, original, seed)
        step(rebuilt, copy, seed)
    assert_same(copy, original)


def test_every_group_keeps_its_own_settings() -> None:
    owned = parameters()
    groups = [{"params": owned[:1], "lr": 0.5}, {"params": owned[1:], "betas": (0.1, 0.2)}]
    spec = taken_apart(torch.optim.AdamW(groups, lr=0.3), owned)
    assert [group.parameters for group in spec.groups] == [(0,), (1,)]
    assert [group.settings["lr"] for group in spec.groups] == [0.5, 0.3]
    rebuilt = build_optimizer(spec, list(owned), fast=False)
    assert [group["betas"] for group in rebuilt.param_groups] == [(0.9, 0.999), (0.1, 0.2)]


def test_what_a_scheduler_changes_is_taken_over_and_how_it_is_computed_is_not() -> None:
    owned = parameters()
    optimizer = torch.optim.SGD(owned, lr=0.1, momentum=0.9)
    store = build_optimizer(taken_apart(optimizer, owned), list(owned), fast=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.025, dtype=torch.float64)
    optimizer.param_groups[0]["momentum"] = 0.5
    apply_settings(store, group_settings(optimizer))
    assert (store.param_groups[0]["lr"], store.param_groups[0]["momentum"]) == (0.025, 0.5)
    assert store.param_groups[0]["fused"] is True


def test_the_users_choice_of_implementation_is_respected() -> None:
    owned = parameters()
    for choice in ({"foreach": True}, {"fused": False}):
        spec = taken_apart(torch.optim.SGD(owned, lr=0.1, **choice), owned)
        rebuilt = build_optimizer(spec, list(owned), fast=True)
        assert not rebuilt.param_groups[0]["fused"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_move_in_all_their_elements(dtype: torch.dtype) -> None:
    """torch's fused SGD moves only the last few of them."""
    weights: Tensor = torch.zeros(131, dtype=dtype)
    owned = [nn.Parameter(torch.zeros(131, dtype=dtype))]
    spec = taken_apart(torch.optim.SGD(owned, lr=0.5), owned)
    optimizer = build_optimizer(spec, [weights], fast=True)
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    assert torch.equal(weights, torch.full_like(weights, -0.5))


class Foreign(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "several times per step"),
        (lambda p: torch.optim.SparseAdam(p), "needs sparse gradients"),
        (lambda p: Foreign(p, lr=0.1), "Foreign is not one of torch.optim"),
    ],
)
def test_an_optimizer_the_store_cannot_run_is_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe_optimizer(optimizer(parameters()), {})


def test_a_setting_that_is_not_plain_data_is_refused_by_name() -> None:
    owned = parameters()
    optimizer = torch.optim.SGD([{"params": owned, "hook": print}], lr=0.1)
    with pytest.raises(ConfigError, match="optimizer setting hook="):
        describe_optimizer(optimizer, {id(p): i for i, p in enumerate(owned)})


@pytest.mark.parametrize("name", ["LBFGS", "NoSuch", "Optimizer.__init__", "lr_scheduler"])
def test_a_name_that_is_no_optimizer_is_not_built(name: str) -> None:
    with pytest.raises(ConfigError, match="no optimizer"):
        build_optimizer(OptimizerSpec(name, ()), [], fast=True)


def test_factors_on_settings_leave_the_settings_themselves_alone() -> None:
    sgd, adam = {"lr": 0.1, "momentum": 0.8}, {"lr": 0.1, "betas": [0.9, 0.999]}
    assert adjust([sgd, adam], {}) == [sgd, adam]
    assert adjust([sgd, adam], {"momentum": 0.5}) == [
        {"lr": 0.1, "momentum": 0.4},
        {"lr": 0.1, "betas": [0.45, 0.999]},
    ]
    assert adjust([sgd], {"weight_decay": 2.0}) == [sgd]
    assert (sgd["momentum"], adam["betas"]) == (0.8, [0.9, 0.999])
