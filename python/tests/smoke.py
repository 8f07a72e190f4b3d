"""The installed wheel on whatever interpreter runs this, with numpy alone: a plan, and two ranks that run it."""

import os
import socket
import subprocess
import sys

import numpy as np

import crossmesh as cm

if "RANK" not in os.environ:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place["CROSSMESH_SECRET"] = os.urandom(16).hex()
    ranks = [subprocess.Popen([sys.executable, __file__], env=os.environ | place | {"RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(rank.wait(60) for rank in ranks))

plan = cm.plan({"w": ("f32[8,6]@A{x:2}=0-1(x,_)", "f32[8,6]@B{y:2}=0-1(_,y)")})
assert plan.verify().startswith("every element arrives exactly once")
full = np.arange(48, dtype=np.float32).reshape(8, 6)
with cm.init() as job:
    out = job.run(plan, {"w": full[4 * job.rank : 4 * job.rank + 4].copy()}, timeout_s=30)
    assert np.array_equal(out["w"].numpy(), full[:, 3 * job.rank : 3 * job.rank + 3])
    if job.rank == 0:
        print(f"CPython {sys.version.split()[0]}: {cm.__file__}")
