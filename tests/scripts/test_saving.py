"""What a script saves of a prepared model: as in plain PyTorch, under every protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import Lab

HERE = Path(__file__).parent
KINDS = [
    ("bsp", "shared"),
    ("dssp", "shared"),
    ("asp", "shared"),
    ("allreduce", "shared"),
    ("local_sgd", "shared"),
    ("allreduce", "gloo"),
    ("local_sgd", "gloo"),
]


@pytest.mark.parametrize(("protocol", "fabric"), KINDS)
def test_a_prepared_model_is_saved_copied_and_pickled_at_its_own_size(
    lab: Lab, tmp_path: Path, protocol: str, fabric: str
) -> None:
    lab.trained(HERE / "cnn_batchnorm.py", tmp_path, workers=2, protocol=protocol, fabric=fabric)
    for rank in range(2):
        found = json.loads((tmp_path / f"sizes{rank}.json").read_text())
        assert found["prepared"] == found["plain"]
        assert not found["zero"]
