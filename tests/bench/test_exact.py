"""What the benchmarks that simulate exactly say of runs that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.errors import EngineLost
from paceline_bench.exact import ExactRuns, trouble


def settings(folder: Path) -> RunConfig:
    return RunConfig(run="a", folder=str(folder), script="a.py", workers=2, protocol="bsp")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended({0: 0, 1: 0}, 0), ""),
        (Ended({0: 0, 1: 1}, 0), "ranks [1] failed: not finite"),
        (Ended({0: 1, 1: 1}, 1), "ranks [0, 1] failed: not finite no room"),
        (Ended({0: 0, 1: 0}, -9), "the store failed: no room"),
    ],
)
def test_last_words_are_those_of_whoever_failed(tmp_path: Path, ended: Ended, said: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank1.log").write_text("step 1\nnot finite\n")
    (logs / "store.log").write_text("no room\n")
    assert trouble(settings(tmp_path), ended) == said


def test_after_an_engine_was_lost_the_next_run_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    class Engine:
        def __init__(self, script: str) -> None:
            begun.append(script)

        def launch(self, config: RunConfig) -> None:
            if len(begun) == 1:
                raise EngineLost("gone")

        def wait(self, timeout_s: float) -> Ended:
            return Ended({0: 0}, 0)

    monkeypatch.setattr("paceline_bench.exact.LocalEngine", Engine)
    runs, looks = ExactRuns("a.py"), []
    with pytest.raises(EngineLost):
        runs.run(settings(tmp_path))
    assert runs.run(settings(tmp_path), lambda: looks.append(1)) == Ended({0: 0}, 0)
    assert (begun, looks) == (["a.py", "a.py"], [1])
    assert (tmp_path / "config.json").exists()
