"""The weights of every published pipeline, against its recurrence written out over batches."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.pipeline.in_turn import InTurn
from paceline.parallel.registry import PIPELINES, make_pipeline
from support.pipelines import batches, blocks
from support.recurrence import RULES, recurrence, rule_of

STAGES, CUTS, BATCHES = 3, (1, 2), 13
"""More batches than any delay, and an odd number of them."""
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)

CASES = [
    *((name, {}, {}) for name in sorted(RULES)),
    ("fdg", {"order": "forward_first"}, {"backward_first": False}),
    ("fdg", {"weights": "current"}, {"stashed": False}),
    ("fdg", {"shrink": 0.5}, {"shrink": 0.5}),
    ("fdg", {"predict": True}, {"predict": True}),
    ("fdg", {"predict": True, "order": "forward_first"}, {"predict": True, "backward_first": False}),
    ("fdg", {"predict": True, "weights": "current"}, {"predict": True, "stashed": False}),
    ("adl", {"every": 3}, {"every": 3}),
    ("adl", {"predict": True}, {"predict": True}),
    ("adl", {"every": 4, "predict": True}, {"every": 4, "predict": True}),
    ("adl", {"order": "forward_first", "predict": True}, {"backward_first": False, "predict": True}),
    ("layerwise", {"p": "0,1,0", "m": "5,2,0"}, {"staleness": (5, 2, 0)}),
    ("layerwise", {"predict": True}, {"predict": True}),
]


def trained(name: str, settings: dict[str, object]) -> list[Tensor]:
    model = deepcopy(blocks(STAGES)).double()
    pipe = InTurn(make_pipeline(name, settings).schedule(STAGES), model, CUTS, F.cross_entropy, SGD)
    for x, y in doubles():
        pipe.step(x, y)
    pipe.settle()
    return list(model.parameters())


def expected(name: str, changed: dict[str, object]) -> list[Tensor]:
    model = blocks(STAGES).double()
    rule = rule_of(name, STAGES, **changed)
    stages = recurrence(list(model), doubles(), rule, rate=lambda batch: 0.3, momentum=0.9)
    return [tensor for stage in stages for tensor in stage.values()]


def doubles() -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in batches(BATCHES)]


@pytest.mark.parametrize(("name", "settings", "changed"), CASES, ids=lambda value: str(value))
def test_a_pipeline_trains_the_weights_of_its_recurrence(
    name: str, settings: dict[str, object], changed: dict[str, object]
) -> None:
    for ours, theirs in zip(trained(name, settings), expected(name, changed), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_two_of_these_recurrences_give_the_same_weights() -> None:
    """Else one pipeline could be taken for another."""
    assert set(RULES) == set(PIPELINES)
    made = [torch.cat([p.flatten() for p in expected(name, changed)]) for name, _, changed in CASES]
    for index, one in enumerate(made):
        for other in made[:index]:
            assert (one - other).abs().max() > 1e-6
