"""One paper, one file. A protocol is registered by one line here and checked by the contract tests."""

from __future__ import annotations

from paceline.protocols.asp import ASP
from paceline.protocols.backup_bsp import BackupBSP
from paceline.protocols.base import Fate, Flush, Pacing, Verdict
from paceline.protocols.bounded_ps import BoundedPS
from paceline.protocols.bsp import BSP
from paceline.protocols.clocks import Clocks
from paceline.protocols.dssp import DSSP
from paceline.protocols.elastic_bsp import ElasticBSP
from paceline.protocols.hybrid_sgd import HybridSGD
from paceline.protocols.pacer import Decision, Pacer
from paceline.protocols.psp import PSP
from paceline.protocols.ssp import SSP
from paceline.protocols.sync_switch import SyncSwitch

PROTOCOLS: dict[str, type[Pacing]] = {
    "asp": ASP,
    "backup_bsp": BackupBSP,
    "bounded_ps": BoundedPS,
    "bsp": BSP,
    "dssp": DSSP,
    "elastic_bsp": ElasticBSP,
    "hybrid_sgd": HybridSGD,
    "psp": PSP,
    "ssp": SSP,
    "sync_switch": SyncSwitch,
}

__all__ = ["PROTOCOLS", "Clocks", "Decision", "Fate", "Flush", "Pacer", "Pacing", "Verdict"]
