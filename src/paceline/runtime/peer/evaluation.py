"""How a peer is evaluated: it wears the mean of all models for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.runtime.peer.carrier import Carrier
from paceline.runtime.peer.state import PeerState
from paceline.runtime.worker.writing import evaluation_wrote
from paceline.store.vector import FlatVector


class PeerEvaluation:
    """One peer's."""

    def __init__(self, peer: PeerState, carrier: Carrier) -> None:
        self._peer, self._carrier = peer, carrier
        self._link = peer.trainer.link
        self._aside: tuple[Any, Any] = (None, None)
        """What it is when it does not wear the mean."""
        self._worn: FlatVector | None = None
        """The mean, as it was when it was put on."""

    def away(self) -> None:
        """Wear the mean of all models."""
        self._link.away()
        parameters, buffers = self._carrier.mean()
        self._wear(parameters, buffers)
        self._worn = None if self._peer.trainer.shared else parameters.clone()

    def check_worn(self) -> None:
        """Refuse that somebody has written to the mean: it is worn for a while only."""
        if self._worn is None:
            return
        name = self._peer.trainer.binding.differing(self._worn.parts)
        if name is not None:
            raise evaluation_wrote(self._link.rank, name)

    def back(self, values: dict[str, float], seconds: float) -> None:
        """Be oneself again, and tell what was found."""
        self._take_off()
        self._worn = None
        self._link.back(values | self._carrier.figures(), seconds)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """In here the model is the mean of all, as it would be evaluated and saved."""
        self._link.away(distance=True)
        self._wear(*self._carrier.mean())
        try:
            yield
        finally:
            self._take_off()

    def apart(self) -> float:
        """How far the replicas are from their mean."""
        return self._carrier.distance(self._link.away(distance=True))

    def _take_off(self) -> None:
        me = self._peer.me
        parameters, me.buffers[:] = self._aside
        if parameters is not None:
            me.parameters[:] = parameters

    def _wear(self, parameters: FlatVector, buffers: FlatVector) -> None:
        """Be the mean for a while. Where all have one model, only buffers may differ."""
        me, shared = self._peer.me, self._peer.trainer.shared
        self._aside = None if shared else me.parameters.clone(), me.buffers.clone()
        if not shared:
            me.parameters[:] = parameters
        me.buffers[:] = buffers
