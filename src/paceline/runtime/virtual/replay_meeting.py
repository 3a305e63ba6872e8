"""Where peers meet in a replay: in the recorded order, and at rest when the record says so.

Whoever waited at an epoch's end in the recorded run may compute meanwhile in a replay, which knows what work
is left. So who sleeps does not tell when the mean was taken: the record does.
"""

from __future__ import annotations

from paceline.runtime.meeting.place import MeetingPlace


class ReplayMeeting(MeetingPlace):
    """One per replay of a peer run."""

    _rested = False

    @property
    def _at_rest(self) -> bool:
        return self._rested

    def rest(self) -> None:
        """All sleep now, as they did then."""
        self._rested = True
        self.look()
        self._rested = False
