"""The batches of a pipeline: pairs of inputs and labels, which only first stages load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.errors import ConfigError
from paceline.parallel.loading import MeshLoader


class Pairs(MeshLoader):
    """A pipeline's loader: batches are (inputs, labels).

    Where batches are not loaded, both are None: the labels go from the first stage to the last.
    """

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in super().__iter__():
            yield (None, None) if batch is None else pair(batch)


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"a pipeline trains on batches of two, inputs and labels, got a {type(batch).__name__}"
        f"{f' of {len(batch)}' if isinstance(batch, tuple | list) else ''}. Use a collate_fn that makes two."
    )
