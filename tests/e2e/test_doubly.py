"""DDP and FSDP around a model of a run are refused: they would keep all workers in lockstep in silence."""

from __future__ import annotations

from typing import Any

import pytest

from support.ports import free_port
from support.runs import Lab


@pytest.mark.some(4)
@pytest.mark.parametrize("how", ["before", "within", "after", "sharded"])
@pytest.mark.parametrize(
    "dials",
    [
        {"protocol": "asp"},
        {"protocol": "bsp"},
        {"protocol": "local_sgd"},
        {"protocol": "asp", "apply": "increments"},
        {"protocol": "allreduce", "fabric": "gloo"},
        {"mesh": {"data": 2}},
    ],
)
def test_a_wrapper_that_exchanges_gradients_itself_is_refused_with_a_way_out(
    lab: Lab, how: str, dials: dict[str, Any]
) -> None:
    run = lab.run("doubly.py", "--how", how, "--port", free_port(), workers=2, **dials)
    assert run.end.user_mistake, f"{run.end.detail}\n{run.logs()}"
    what = "fully_shard" if how == "sharded" else "DistributedDataParallel"
    assert f"{what} is around a model that the run trains" in run.end.detail
    assert "paceline.join(environment=False)" in run.end.detail
    assert run.pushes == []
