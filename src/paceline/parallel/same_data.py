"""Before training: whether all ranks have the same data, in the same order."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.decoding import decode_message
from paceline.errors import ConfigError
from paceline.parallel.mesh import gather_bytes
from paceline.runtime.checkpoints.random_state import digest
from paceline.runtime.worker.data.fingerprint import fingerprint
from paceline.store.work.budget import Fingerprint, different_data


def check_same_data(loader: Any, size: int) -> None:
    """Refuse other data on some rank, or a generator that stands elsewhere. All ranks come here."""
    _check_same_order(loader, size)
    told = gather_bytes(msgspec.msgpack.encode(fingerprint(loader)), size)
    first, *others = (decode_message(each, kind=Fingerprint) for each in told)
    other = next((rank for rank, each in enumerate(others, 1) if not first.fits(each)), None)
    if other is not None:
        raise ConfigError(different_data(other))


def _check_same_order(loader: Any, size: int) -> None:
    told = gather_bytes(digest(loader).encode(), size)
    other = next((rank for rank, order in enumerate(told) if order != told[0]), None)
    if other is not None:
        raise ConfigError(
            f"the loader's generator has different states on ranks 0 and {other}, so their epochs would "
            "have different orders. Use the same seed on all, or give the loader no generator."
        )
