"""`--engine`: what cannot work is refused before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.engines import check_engine
from paceline.cli.train import make_config
from paceline.errors import ConfigError


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
