"""`--engine`: who starts the workers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.engines.engine import Engine


def check_engine(asked: dict[str, Any]) -> None:
    """Refuse what cannot work before anything is started."""
    engine, master, address = asked.get("engine", "local"), asked.get("master"), asked.get("address")
    if address is not None and engine != "ray":
        raise ConfigError(f"--address {address} is where Ray is reached. Add --engine ray, or leave it out.")
    if master is not None and engine != "spark":
        raise ConfigError(
            f"--master {master} is where Spark is reached. Add --engine spark, or leave it out."
        )
    if engine != "local" and asked.get("here") is not None:
        raise ConfigError(f"--here starts workers on this machine, but --engine {engine} places all of them.")
    if asked.get("tls_cert") and asked.get("tls_key"):
        from paceline.fabric.tls import Seal

        Seal(asked["tls_cert"], asked["tls_key"])
    if asked.get("store_hosts", 1) > 1 and engine == "local" and asked.get("listen") is None:
        raise ConfigError(
            f"the store is to lie on {asked['store_hosts']} hosts, but the run does not listen for any. Name "
            "an address with --listen."
        )
    if asked.get("tls") and engine == "local" and asked.get("listen") is None:
        raise ConfigError(
            "--tls is for what travels between hosts, and this run does not listen. "
            "Add --listen HOST:PORT, or leave it out."
        )
    if engine == "spark" and find_spec("pyspark") is None:
        raise ConfigError("--engine spark needs PySpark. Install it: pip install 'paceline[spark]'")
    if engine == "ray":
        from paceline.engines.ray_cluster import check_ray

        check_ray(address)


@contextmanager
def open_engine(config: RunConfig) -> Iterator[Engine]:
    """The engine that was asked for, until the run is over."""
    if config.engine == "spark":
        with _spark(config.master or "local[*]") as engine:
            yield engine
        return
    if config.engine == "ray":
        from paceline.engines.ray import RayEngine

        with RayEngine(config.address) as ray:
            yield ray
        return
    from paceline.engines.local import LocalEngine

    with LocalEngine(config.script) as local:
        yield local


@contextmanager
def _spark(master: str) -> Iterator[Engine]:
    from paceline.engines.spark import SparkEngine, connect

    spark = connect(master)
    try:
        with closing(SparkEngine(spark)) as engine:
            yield engine
    finally:
        spark.stop()
