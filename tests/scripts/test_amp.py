"""Mixed precision with a GradScaler: gradients unscaled, overflows skipped as in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.runs import Lab
from support.tensors import assert_close

HERE = Path(__file__).parent
SCRIPT = HERE / "amp_loop.py"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script without workers, whose batch is what two workers have together."""
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, SCRIPT, folder, "--batch", "8", "--fused"], check=True, timeout=60)
    return folder


def scale(folder: Path, rank: int = 0) -> float:
    return float(json.loads((folder / f"rank{rank}.json").read_text()))


@pytest.mark.parametrize(
    ("protocol", "fabric", "flags"),
    [
        ("bsp", "shared", ("--fused",)),
        ("allreduce", "shared", ()),
        ("allreduce", "gloo", ("--unscale",)),
    ],
)
def test_an_overflow_of_one_worker_is_skipped_by_all_where_a_round_is_one_step(
    lab: Lab, tmp_path: Path, reference: Path, protocol: str, fabric: str, flags: tuple[str, ...]
) -> None:
    assert scale(reference) == 2.0**13, "three of twelve batches overflow"
    run = lab.trained(SCRIPT, tmp_path, *flags, workers=2, protocol=protocol, fabric=fabric)
    assert_close(run.weights, load_file(reference / "rank0.safetensors"), 2e-3)
    assert [scale(tmp_path, rank) for rank in range(2)] == [scale(reference)] * 2


@pytest.mark.parametrize(("protocol", "flags"), [("asp", ("--fused",)), ("dssp", ()), ("local_sgd", ())])
def test_elsewhere_a_worker_leaves_out_its_own_overflow_and_goes_on(
    lab: Lab, tmp_path: Path, protocol: str, flags: tuple[str, ...]
) -> None:
    run = lab.trained(SCRIPT, tmp_path, *flags, workers=2, protocol=protocol)
    assert all(bool(tensor.isfinite().all()) for tensor in run.weights.values())
    fell = [2.0**16 / scale(tmp_path, rank) for rank in range(2)]
    assert fell[0] * fell[1] == 2.0**3, "every overflow lowered the scale of the worker that had it"


@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_worker_under_a_scaler_trains_as_plain_pytorch_does(
    lab: Lab, tmp_path: Path, reference: Path, clip: float | None
) -> None:
    run = lab.trained(SCRIPT, tmp_path, "--batch", 8, "--fused", workers=1, clip_norm=clip)
    weights = load_file(reference / "rank0.safetensors")
    if clip is None:
        assert_close(run.weights, weights, 1e-6)
    else:  # a clipped gradient of a scaled loss would hardly move anything
        moved = max(float((run.weights[n] - weights[n]).abs().max()) for n in weights)
        assert 1e-3 < moved < 1.0
    assert scale(tmp_path) == scale(reference)
