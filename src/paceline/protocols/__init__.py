"""One paper, one file. A protocol is registered by one line here and checked by the contract tests.

`PACED` protocols use a parameter store and decide when its workers run. `PEERS` protocols have no store.
"""

from __future__ import annotations

from paceline.protocols.core.base import Fate, Flush, Pacing, Verdict
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.core.pacer import Decision, Pacer
from paceline.protocols.core.peer import Peer
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.backup_bsp import BackupBSP
from paceline.protocols.paced.bounded_ps import BoundedPS
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.dssp import DSSP
from paceline.protocols.paced.elastic_bsp import ElasticBSP
from paceline.protocols.paced.hybrid_sgd import HybridSGD
from paceline.protocols.paced.psp import PSP
from paceline.protocols.paced.ssp import SSP
from paceline.protocols.paced.sync_switch import SyncSwitch
from paceline.protocols.peer.ad_psgd import ADPSGD
from paceline.protocols.peer.allreduce import AllReduce
from paceline.protocols.peer.diloco import DiLoCo
from paceline.protocols.peer.dpsgd import DPSGD
from paceline.protocols.peer.ds_sync import DSSync
from paceline.protocols.peer.easgd import EASGD
from paceline.protocols.peer.fedavg import FedAvg
from paceline.protocols.peer.hpsgd import HPSGD
from paceline.protocols.peer.local_sgd import LocalSGD
from paceline.protocols.peer.osp import OSP
from paceline.protocols.peer.selsync import SelSync

PACED: dict[str, type[Pacing]] = {
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

__all__ = ["PACED", "PEERS", "Clocks", "Decision", "Fate", "Flush", "Pacer", "Pacing", "Peer", "Verdict"]
