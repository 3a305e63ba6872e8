"""A list of phases as one string: `bsp@0.25,ssp(staleness=3)@0.6,asp`.

    phases    phase , phase , ...
    phase     name, with settings in brackets if any, and @end unless it is the last
    settings  ( name = value , name = value , ... )
    end       where the phase ends: up to 1 a share of the run's work, above 1 samples

You may write `+` instead of any comma, for places where commas separate protocols. An end of 1 is the end of
the run: phases after it never begin. An end of 0 skips the phase.
"""

from __future__ import annotations

import re
from math import inf

import msgspec

from paceline.errors import ConfigError
from paceline.protocols.core.base import Pacing
from paceline.protocols.paced.psp_distributed import own_barrier

EXAMPLE = "Write bsp@0.25,ssp(staleness=3)@0.6,asp, say."
_PHASE = re.compile(r"\s*(?P<name>\w+)\s*(\((?P<settings>[^()]*)\)\s*)?(@(?P<end>[^,+()]*))?")
_COMMA = re.compile("[,+]")


class Phase(msgspec.Struct, frozen=True):
    """One phase: which protocol, and where it ends."""

    name: str
    settings: dict[str, str]
    end: float | None
    """A share of the work if at most 1, otherwise a number of samples. None: the end of the run."""
    text: str
    """As it was written, without its end."""

    def rule(self) -> Pacing:
        """A new protocol object for this phase."""
        from paceline.protocols.settings import make  # which knows all protocols, this one's user too

        rule = make(self.name, self.settings)
        if own_barrier(rule, 0) is not None:
            raise ConfigError(
                f"in phase {self.text!r} workers go on by themselves, so that none could end it. "
                "Use form=central there."
            )
        return rule

    def end_samples(self, total: int | None) -> float:
        """After how many samples of the run's total the phase ends; infinite if that is unknown."""
        if self.end is None or (total is None and 0 < self.end <= 1):
            return inf
        return self.end if self.end > 1 else self.end * (total or 0)


def parse_phases(text: str) -> tuple[Phase, ...]:
    """The phases of a run, without those that can never begin."""
    phases, at = [], 0
    while at <= len(text):
        match = _PHASE.match(text, at)
        if match is None or (match.end() < len(text) and not _COMMA.match(text, match.end())):
            raise ConfigError(f"cannot read phases={text!r} from {text[at:]!r} on. {EXAMPLE}")
        phases.append(_phase(match))
        at = match.end() + 1
    _check_ends(text, phases)
    last = next((i for i, phase in enumerate(phases) if phase.end in (None, 1)), len(phases))
    return tuple(phases[: last + 1])


def _phase(match: re.Match[str]) -> Phase:
    name, settings, end = match["name"], match["settings"] or "", match["end"]
    if name == "sync_switch":
        raise ConfigError(f"a phase cannot be sync_switch itself, got {match[0]!r}. Write its phases.")
    text = match[0].partition("@")[0].strip()
    return Phase(name, _settings(match[0], settings), None if end is None else _end(match[0], end), text)


def _settings(phase: str, text: str) -> dict[str, str]:
    settings = {}
    for item in (part for part in _COMMA.split(text) if part.strip()):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"a phase's settings are name=value, got {item!r} in {phase!r}. {EXAMPLE}")
        settings[name.strip()] = value.strip()
    return settings


def _end(phase: str, text: str) -> float:
    try:
        end = float(text)
    except ValueError:
        end = -1.0
    if not 0 <= end < inf:
        raise ConfigError(
            f"a phase ends at a share (0..1) or after samples (above 1), got {text!r} in {phase!r}. {EXAMPLE}"
        )
    return end


def _check_ends(text: str, phases: list[Phase]) -> None:
    *others, last = phases
    if last.end not in (None, 1):
        raise ConfigError(
            f"the last phase lasts to the end of the run, got @{last.end:g} in {text!r}. Leave it out."
        )
    for phase in (phase for phase in others if phase.end is None):
        raise ConfigError(f"phase {phase.text!r} of {text!r} has no end. Add @0.25, say.")
    ends = [phase.end or 0.0 for phase in others]
    for kind in ([end for end in ends if end <= 1], [end for end in ends if end > 1]):
        if kind != sorted(kind):
            raise ConfigError(f"the ends of {text!r} go back. Let each phase end after the one before.")
