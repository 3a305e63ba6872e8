"""Runs that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from view.synthetic import SyntheticRun, write_run


@pytest.fixture(scope="session")
def four_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """BSP, SSP, DSSP and ASP on four workers, the last of them 2.5 times slower."""
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / name, SyntheticRun(name, run=f"{name}-1", slow={3: 2.5}))
        for name in ("bsp", "ssp", "dssp", "asp")
    ]
