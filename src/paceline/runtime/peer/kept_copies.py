"""What a peer has brought, or was, at iterations that not all have come to: the others may still need it."""

from __future__ import annotations

from paceline.runtime.peer.memory import Halves, PeerMemory


class KeptCopies:
    """One worker's, in memory that the meeting place can read."""

    def __init__(self, memories: PeerMemory) -> None:
        self._memories = memories
        self._free: list[Halves] = []
        self._kept: dict[int, list[Halves]] = {}
        """By iteration."""

    def room(self, iteration: int, oldest: int) -> Halves:
        """Room that is left alone until all have done this iteration. `oldest`: one that somebody is in."""
        for done in [each for each in self._kept if each < oldest]:
            self._free += self._kept.pop(done)
        room = self._free.pop() if self._free else self._memories.lend("what it was")
        self._kept.setdefault(iteration, []).append(room)
        return room
