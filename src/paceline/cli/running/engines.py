"""`--engine`: who starts the workers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.engines import ENGINES, EngineOffer
from paceline.errors import ConfigError, unknown

if TYPE_CHECKING:
    from paceline.engines.engine import Engine


def check_engine(asked: Mapping[str, Any]) -> None:
    """Refuse what cannot work before anything is started."""
    engine, offer = _offer(asked)
    for name, other in ENGINES.items():
        if other.reached_by not in ("", offer.reached_by) and asked.get(other.reached_by) is not None:
            raise ConfigError(
                f"--{other.reached_by} {asked[other.reached_by]} is where {other.title} is reached. Add "
                f"--engine {name}, or leave it out."
            )
    if offer.places and asked.get("here") is not None:
        raise ConfigError(f"--here starts workers on this machine, but --engine {engine} places all of them.")
    _check_listening(asked, offer)
    import_module(offer.module).check(_where(asked, offer))


def _check_listening(asked: Mapping[str, Any], offer: EngineOffer) -> None:
    if asked.get("tls_cert") and asked.get("tls_key"):
        from paceline.fabric.tls import Seal

        Seal(asked["tls_cert"], asked["tls_key"])
    alone = not offer.places and asked.get("listen") is None
    if alone and asked.get("store_hosts", 1) > 1:
        raise ConfigError(
            f"the store is to lie on {asked['store_hosts']} hosts, but the run does not listen for any. Name "
            "an address with --listen."
        )
    if alone and asked.get("tls"):
        raise ConfigError(
            "--tls is for what travels between hosts, and this run does not listen. "
            "Add --listen HOST:PORT, or leave it out."
        )


def open_engine(asked: Mapping[str, Any]) -> AbstractContextManager[Engine]:
    """The engine that was asked for, until the runs are over."""
    _, offer = _offer(asked)
    engine: AbstractContextManager[Engine] = import_module(offer.module).opened(
        asked.get("script"), _where(asked, offer)
    )
    return engine


def _offer(asked: Mapping[str, Any]) -> tuple[str, EngineOffer]:
    engine = asked.get("engine", "local")
    if engine not in ENGINES:
        raise unknown("--engine", str(engine), ENGINES)
    return engine, ENGINES[engine]


def _where(asked: Mapping[str, Any], offer: EngineOffer) -> str | None:
    return asked.get(offer.reached_by) if offer.reached_by else None
