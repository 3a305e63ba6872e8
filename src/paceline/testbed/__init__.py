"""Real hosts on one machine, for trying what happens between hosts.

    with Testbed.up({"a": HostSpec(link_mbit=1000), "b": HostSpec(link_mbit=100, cpu=0.5)}) as bed:
        server = bed["a"].popen(["python", "server.py", bed["a"].address])
        bed["b"].run(["python", "client.py", bed["a"].address], timeout_s=60)
        bed["b"].cut()    # silence, as with a pulled cable
        bed["b"].heal()
        bed["a"].kill()   # all its processes

A host is a network namespace with an address and a name of its own, joined to a bridge by a veth pair
whose two ends are shaped, and a CPU quota. The bridge has a namespace too: testbeds do not see one
another, nor the network of the machine. Files and processes are shared, as with a common file system.

Nothing is left behind: the testbed goes with the `with` block; when the process that owns it dies,
however suddenly, a guard takes it down; should the guard die too, the next `up` of any testbed does.
"""

from __future__ import annotations

from paceline.testbed.bed import BedHost, Testbed
from paceline.testbed.spec import HostSpec, Spec, load_spec
from paceline.testbed.system import why_not

__all__ = ["BedHost", "HostSpec", "Spec", "Testbed", "load_spec", "why_not"]
