"""Train one PyTorch model on many workers, and choose how they keep time.

    import paceline
    pace = paceline.join("dssp", lower=3, upper=15)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)

Importing this module does not import torch; `join` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, PacelineError, RunError, RunStopped

if TYPE_CHECKING:
    from paceline.protocols import Pacing, Peer
    from paceline.runtime.worker.pace import Pace

__all__ = ["ConfigError", "PacelineError", "RunError", "RunStopped", "join", "run"]


def join(
    protocol: str | Pacing | Peer | None = None,
    *,
    correct: str | None = None,
    environment: bool = True,
    **settings: Any,
) -> Pace:
    """Join the run that started this process; without a run, train alone.

    The protocol given here, `join("ssp", staleness=5)` or an object such as `join(HalfWay(near=2))`, is the
    script's default; the command's flags override it. `correct` says how stale gradients are corrected, like
    the flag `--correct`. `environment=False` removes RANK, WORLD_SIZE and similar variables from this
    process, for libraries that would use them to set up their own workers.
    """
    from paceline.protocols.own import check_not_loading

    check_not_loading()
    from paceline.engines.torchrun import sit_down
    from paceline.parallel.joining import join, split_axis

    sit_down(split_axis(protocol))
    if not environment:
        from paceline.runtime.worker.environment import hide_environment

        hide_environment()
    return join(protocol, correct=correct, **settings)


def run(**recipe: Any) -> Any:
    """Train from a few functions: model, data, loss, optimizer, epochs (see `paceline.runtime.recipe`)."""
    from paceline.runtime.recipe import run

    return run(join, **recipe)


def __getattr__(name: str) -> Any:
    """The version. It is looked up on first use, because that takes longer than importing this package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("paceline")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
