"""Ray Tune sweeps protocols, as the example says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.rays import processes_of, ray_environment, short_folder
from support.runs import wait_until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_tune.py"


@pytest.mark.timeout(400)
def test_every_trial_of_ray_tune_is_a_paceline_run(tmp_path: Path) -> None:
    probe = subprocess.run([sys.executable, "-c", "import ray.tune"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("needs Ray Tune: pip install 'paceline[tune]'")
    environment = ray_environment()
    with short_folder() as folder:
        done = subprocess.run(
            [sys.executable, EXAMPLE],
            cwd=tmp_path,
            env=os.environ | environment | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=350,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not processes_of(environment["PACELINE_TESTS_RAY"]), "Ray is gone", 30)
    lines = done.stdout.splitlines()
    results = [msgspec.json.decode(path.read_bytes()) for path in (tmp_path / "runs").glob("2*/result.json")]
    assert sorted((result["protocol"], result["status"]) for result in results) == [
        ("bsp", "finished"),
        ("ssp", "finished"),
    ]
    assert {line.partition(":")[0] for line in lines} >= {"bsp", "ssp staleness=5", "best"}
