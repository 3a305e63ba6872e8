"""`--engine`: what cannot work is refused before anything is started."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.running.engines import check_engine
from paceline.cli.train import make_config
from paceline.engines import ENGINES, EngineOffer
from paceline.errors import ConfigError
from support.runs import SCRIPTS, Lab
from support.shell import Shell


def test_without_pyspark_the_spark_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[spark\]'"):
        check_engine({"engine": "spark"})


def test_a_misspelt_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown --engine 'sparc'\. Did you mean 'spark'\?"):
        make_config({"engine": "sparc"}, Path())


def test_a_master_without_spark_is_refused() -> None:
    with pytest.raises(ConfigError, match="Add --engine spark"):
        check_engine({"master": "spark://host:7077"})


def test_workers_here_are_refused_when_the_engine_places_all() -> None:
    with pytest.raises(ConfigError, match="--engine spark places all of them"):
        check_engine({"engine": "spark", "here": 1})


def test_an_engine_is_one_module_and_one_line(
    lab: Lab, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, str | None]] = []

    def opened(script: str, where: str | None) -> nullcontext[object]:
        heard.append(("opened", where))
        return nullcontext(lab.engine)

    toy = SimpleNamespace(check=lambda where: heard.append(("checked", where)), opened=opened)
    monkeypatch.setitem(sys.modules, "toy_engine", toy)
    monkeypatch.setitem(ENGINES, "toy", EngineOffer("toy_engine", "a toy", "Toy", "address", places=False))
    done = shell("train", SCRIPTS / "train.py", "--engine", "toy", "--address", "shelf", "--", "momentum")
    assert done.code == 0, done.err
    assert heard == [("checked", "shelf"), ("opened", "shelf")]


@pytest.mark.parametrize("command", ["train", "compare", "simulate"])
def test_every_command_that_trains_asks_the_dictionary(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def refuse(*asked: str | None) -> None:
        raise ConfigError("out of order")

    monkeypatch.setitem(sys.modules, "broken_engine", SimpleNamespace(check=refuse, opened=refuse))
    monkeypatch.setitem(ENGINES, "local", EngineOffer("broken_engine", "nobody", places=False))
    refused = shell(command, SCRIPTS / "train.py", "--", "momentum")
    assert (refused.code, refused.error) == (2, "out of order")
