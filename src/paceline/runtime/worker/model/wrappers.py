"""Refuses wrappers that would exchange gradients besides the run: DDP and FSDP around a prepared model.

Every `prepare` of several workers asks, and every trainer while it steps: some wrappers come after prepare.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError

SHARDED = {"FullyShardedDataParallel": "FullyShardedDataParallel", "FSDPModule": "fully_shard"}
"""Classes of sharded modules, and what makes them; by name, since importing them takes long."""
FLAT = {"FlatParameter", "DTensor"}
"""Parameters of sharded modules."""

_ours: dict[int, nn.Parameter] = {}
"""The parameters that this process trains as a worker of a run."""
_watches = False


def refuse_wrapped(models: Sequence[nn.Module]) -> None:
    """Refuse models with such a wrapper within, or around them by now; and from now on whoever adds one."""
    global _watches
    for model in models:
        for part in model.modules():
            if isinstance(part, DistributedDataParallel):
                raise _besides("DistributedDataParallel", "Give pace.prepare the model inside of it.")
        refuse_sharded(model)
        _ours.update((id(p), p) for p in model.parameters())
    if _connected() and (wrapped := _existing()):
        raise _besides(wrapped)
    if not _watches:
        _watches = True
        DistributedDataParallel.__init__ = _refusing(DistributedDataParallel.__init__)  # type: ignore[method-assign]


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that FSDP has cut into shards: its parameters are others than those that are trained."""
    if not _connected():
        return
    kinds = {kind.__name__ for part in model.modules() for kind in type(part).__mro__}
    kinds |= {type(p).__name__ for p in model.parameters()} & FLAT
    found = next((how for name, how in SHARDED.items() if name in kinds), "FSDP" if kinds & FLAT else "")
    if found:
        raise _besides(found)


def _connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _existing() -> str:
    """The class of a wrapper that was made before and holds parameters of ours."""
    kinds = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return next((type(each).__name__ for each in kinds if _has_ours(each)), "")


def _has_ours(module: nn.Module) -> bool:
    return any(id(p) in _ours for p in module.parameters())


def _refusing(made: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(made)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _has_ours(module):
            raise _besides(type(self).__name__)
        made(self, module, *args, **kwargs)

    return init


def _besides(what: str, instead: str = "Train the model that pace.prepare was given.") -> ConfigError:
    return ConfigError(
        f"{what} is around a model that the run trains. It exchanges gradients or weights of all workers by "
        "itself in every step, so the run's protocol would decide nothing. Leave it out, and "
        f"init_process_group. {instead} If a library adds it because it finds RANK and WORLD_SIZE "
        "(accelerate, transformers' Trainer), call paceline.join(environment=False) before it is set up."
    )
