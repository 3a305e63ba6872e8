"""One paper, one file. A protocol is registered by one line here and checked by the contract tests."""

from __future__ import annotations

from paceline.protocols.asp import ASP
from paceline.protocols.base import Fate, Flush, Pacing, Verdict
from paceline.protocols.bsp import BSP
from paceline.protocols.clocks import Clocks
from paceline.protocols.dssp import DSSP
from paceline.protocols.pacer import Decision, Pacer
from paceline.protocols.ssp import SSP

PROTOCOLS: dict[str, type[Pacing]] = {
    "asp": ASP,
    "bsp": BSP,
    "dssp": DSSP,
    "ssp": SSP,
}

__all__ = ["PROTOCOLS", "Clocks", "Decision", "Fate", "Flush", "Pacer", "Pacing", "Verdict"]
