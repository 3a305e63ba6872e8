"""Who starts the workers of a run. An engine is one module, and one line in `ENGINES`.

The module has two functions:

    check(where: str | None) -> None                      refuse what cannot work before anything is started
    opened(script: str | None, where: str | None)         a context manager: the engine (see engine.py), until
                                                          the runs are over

`where` is what the flag said by which the engine is reached, if it has one.
"""

from __future__ import annotations

from typing import NamedTuple


class EngineOffer(NamedTuple):
    """An engine, as far as it has to be known before its module is imported."""

    module: str
    help: str
    """For `--engine`: who starts the workers."""
    title: str = ""
    reached_by: str = ""
    """The flag, and the field of the configuration, that says where it is reached."""
    places: bool = True
    """Whether it finds a place for every worker and listens for them; else all start here, or others join."""


ENGINES: dict[str, EngineOffer] = {
    "local": EngineOffer("paceline.engines.local", "this machine", places=False),
    "ray": EngineOffer("paceline.engines.ray", "Ray, wherever it has room (1 CPU each)", "Ray", "address"),
    "spark": EngineOffer(
        "paceline.engines.spark", "Spark, one task each, in its executors", "Spark", "master"
    ),
}
