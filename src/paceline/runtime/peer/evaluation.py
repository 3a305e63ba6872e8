"""How a peer is evaluated: it wears the mean of all models for a while."""

from __future__ import annotations

from torch import Tensor

from paceline.runtime.peer.stopping import StoppablePeer
from paceline.store.layout import Layout
from paceline.store.replicas import answer_parts
from paceline.store.vector import FlatVector


class PeerEvaluation(StoppablePeer):
    """A peer, as far as evaluation is concerned."""

    _layout: Layout
    _answers: dict[bool, Tensor]
    """Where answers lie: those for all, and those for this worker."""

    def _away(self) -> None:
        """Wear the mean of all models."""
        if self._model is None:
            return
        self._link.away()
        self._wear(*self._found())

    def _model_now(self) -> dict[str, Tensor]:
        """The mean of all models, as it would be evaluated and saved."""
        self._link.away(distance=True)
        self._wear(*self._found())
        try:
            return super()._model_now()
        finally:
            self._take_off()

    def _found(self) -> tuple[FlatVector, FlatVector]:
        """Parameters and buffers of the mean that was taken."""
        mean = answer_parts(self._layout, self._answers[False])
        return FlatVector(mean[0]), FlatVector(mean[1])

    def _take_off(self) -> None:
        parameters, self._me.buffers[:] = self._aside
        if parameters is not None:
            self._me.parameters[:] = parameters

    def _wear(self, parameters: FlatVector, buffers: FlatVector) -> None:
        """Be the mean for a while. Where all have one model, only buffers may differ."""
        me = self._me
        self._aside = None if self._shared else me.parameters.clone(), me.buffers.clone()
        if not self._shared:
            me.parameters[:] = parameters
        me.buffers[:] = buffers

    def _apart(self) -> float:
        distance = self._link.away(distance=True).distance
        assert distance is not None
        return distance

    def _back(self, values: dict[str, float], seconds: float) -> None:
        if self._model is None:
            return
        self._take_off()
        self._link.back(values, seconds)
