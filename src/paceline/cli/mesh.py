"""`--mesh`: what of it can be said before anything is started."""

from __future__ import annotations

from typing import Any


def is_split(protocol: str | None) -> bool:
    """Whether a protocol splits the model."""
    from paceline.parallel.registry import PIPELINES

    return protocol in PIPELINES


def resolved_mesh(
    text: str | None, protocol: str | None, workers: int, typed: bool
) -> tuple[dict[str, int] | None, int]:
    """Axes and workers. A pipeline has a stage per worker if no mesh is named; a mesh names its workers."""
    from paceline.protocols.grid import Grid, parse_mesh

    if text is not None:
        axes = parse_mesh(text)
        workers = workers if typed else Grid(axes).count
        return (axes if Grid(axes).count > 1 or workers > 1 else None), workers
    return ({"stage": workers} if is_split(protocol) and workers > 1 else None), workers


def check_split(protocol: str | None, settings: dict[str, Any], axes: dict[str, int] | None) -> None:
    """Find a misspelt protocol or setting, or delays that do not fit, before anything is started."""
    from paceline.errors import ConfigError
    from paceline.parallel.registry import ALONG, check_along, make_pipeline
    from paceline.protocols.settings import make_any

    if protocol is None:
        return
    if is_split(protocol):
        make_pipeline(protocol, settings).schedule((axes or {}).get("stage", 1))
        return
    make_any(protocol, settings)
    if protocol not in ALONG:
        raise ConfigError(
            f"protocol {protocol!r} splits no model, as --mesh asks. Use one that does (bp, fr, ddg, fdg, "
            f"adl, layerwise), one for copies along the axis data ({', '.join(ALONG)}), or leave --mesh out."
        )
    check_along(protocol, settings)
