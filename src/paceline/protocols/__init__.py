"""One paper, one file. A protocol is registered by one line here and checked by the contract tests.

`PROTOCOLS` are the paced ones, which decide for a store in the middle; `PEERS` have no middle.
"""

from __future__ import annotations

from paceline.protocols.ad_psgd import ADPSGD
from paceline.protocols.allreduce import AllReduce
from paceline.protocols.asp import ASP
from paceline.protocols.backup_bsp import BackupBSP
from paceline.protocols.base import Fate, Flush, Pacing, Verdict
from paceline.protocols.bounded_ps import BoundedPS
from paceline.protocols.bsp import BSP
from paceline.protocols.clocks import Clocks
from paceline.protocols.diloco import DiLoCo
from paceline.protocols.dpsgd import DPSGD
from paceline.protocols.ds_sync import DSSync
from paceline.protocols.dssp import DSSP
from paceline.protocols.easgd import EASGD
from paceline.protocols.elastic_bsp import ElasticBSP
from paceline.protocols.fedavg import FedAvg
from paceline.protocols.hpsgd import HPSGD
from paceline.protocols.hybrid_sgd import HybridSGD
from paceline.protocols.local_sgd import LocalSGD
from paceline.protocols.osp import OSP
from paceline.protocols.pacer import Decision, Pacer
from paceline.protocols.peer import Peer
from paceline.protocols.psp import PSP
from paceline.protocols.selsync import SelSync
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

PEERS: dict[str, type[Peer]] = {
    "ad_psgd": ADPSGD,
    "allreduce": AllReduce,
    "diloco": DiLoCo,
    "dpsgd": DPSGD,
    "ds_sync": DSSync,
    "easgd": EASGD,
    "fedavg": FedAvg,
    "hpsgd": HPSGD,
    "local_sgd": LocalSGD,
    "osp": OSP,
    "selsync": SelSync,
}

__all__ = ["PEERS", "PROTOCOLS", "Clocks", "Decision", "Fate", "Flush", "Pacer", "Pacing", "Peer", "Verdict"]
