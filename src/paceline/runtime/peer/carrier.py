"""What carries vectors between one peer and the others: the interface of every fabric.

A fabric's carrier is made with the worker's link, before there is a model. To add one, write a class with
these methods and register it in `runtime/fabrics.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from paceline.protocols.core.operations import Average, Exchange, Handle, Mix
from paceline.runtime.messages.workers import Meet, Met, Release
from paceline.runtime.peer.state import PeerState
from paceline.runtime.worker.model.binding import Binding
from paceline.store.vector import FlatVector


class Carrier(Protocol):
    """One worker's."""

    # -- preparing ----------------------------------------------------------------------------

    def ground(self, binding: Binding) -> tuple[Tensor, Tensor]:
        """What the model is tied to: the memory of gradients and buffers, and the weights."""

    def connect(self, peer: PeerState) -> None:
        """The model is ready: from now on vectors are carried."""

    # -- vectors ------------------------------------------------------------------------------

    def exchange(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        """Carry out a joint operation with all who take part; the answer."""

    def start(self, operation: Average | Mix | Exchange) -> Handle:
        """Send a vector off, and go on."""

    def test(self, handle: Handle) -> Any:
        """Whether what was started is complete."""

    def now(self) -> float:
        """The seconds on the run's clock."""

    def wait(self, handle: Handle) -> FlatVector:
        """The answer to what was started."""

    def trade(self, operation: Exchange) -> FlatVector:
        """Exchange with a cell that the run keeps; nobody has to come."""

    def begins(self) -> Any:
        """An iteration has begun, of a protocol whose workers are apart: keep what this worker is now."""

    def completed(self) -> None:
        """It is complete: the run may see this worker as it is now."""

    def keep(self, vector: Any) -> FlatVector:
        """A copy that lasts, where the run can see it."""

    def memory_at(self, start: int) -> Tensor | None:
        """The memory that begins there, laid out as weights are, if answers lie in it."""

    def cleared(self) -> None:
        """The script clears its gradients."""

    # -- the mean of all models ---------------------------------------------------------------

    def mean(self) -> tuple[FlatVector, FlatVector]:
        """Parameters and buffers of the mean that was taken while this worker slept."""

    def distance(self, release: Release) -> float:
        """How far the replicas were from it, when the run released this worker."""

    def figures(self) -> dict[str, float]:
        """What this worker has to report of it, if the run itself cannot know."""

    # -- words --------------------------------------------------------------------------------

    def meet(self, message: Meet) -> Met:
        """Tell the meeting place, and sleep until it is carried out."""

    def tell(self, message: Meet) -> None:
        """Tell the meeting place, and go on."""

    def leaving(self) -> bool:
        """The last iteration is done. Whether others are there to bring to an end what is under way."""

    def close(self) -> None:
        """This worker has left."""
