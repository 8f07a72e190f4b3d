"""Every mistake that docs/python.md lists gets the error that it says, naming what is wrong and a way out, in time; nobody hangs or ends.

What needs more room than a row has it elsewhere: arrays, handles and ranks that go in test_job.py, names and versions in test_sync.py.
"""

import signal
import time

import pytest
from ranks import Ranks, allowed, free_port, run

import crossmesh as cm

PLAN = """
plan = cm.plan({"w": ("f32[8]@A{x:1}=0(_)", "f32[8]@B{y:1}=1(_)")})
def raises(kind, words, call):
    start = time.monotonic()
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(words)
    return time.monotonic() - start
"""


def test_arrays():
    """Shape, dtype, device, read-only, JAX's, and a name that is missing: tensor, rank, expected, given, the fix."""
    run(2, PLAN + """
class OnGpu:
    def __dlpack_device__(self): return (2, 0)
    def __dlpack__(self, **_): raise AssertionError("it is not asked for its memory")
class Immutable:
    # As JAX's arrays speak DLPack: an old capsule, which has no flag.
    def __init__(self): self._array = np.zeros(8, np.float32)
    def __dlpack_device__(self): return (1, 0)
    def __dlpack__(self, **_): return self._array.__dlpack__()
Immutable.__module__ = "jaxlib._jax"
job = cm.init()
if rank == 0:
    for value, words in (
        (np.zeros(9, np.float32), ["tensor `w` of rank 0, source", "shape [8] is expected, [9] was given"]),
        (np.zeros(8, np.int32), ["dtype f32 is expected, i32 was given", "hint: cast it"]),
        (OnGpu(), ["memory of the host is expected, device 2 of DLPack was given", "hint: bring it to the host"]),
    ):
        assert raises(cm.ArrayError, words, lambda: job.start(plan, {"w": value})) < allowed(2)
    raises(cm.ArrayError, ["rank 0, source: missing", "hint"], lambda: job.start(plan, {}))
else:
    frozen = np.zeros(8, np.float32)
    frozen.flags.writeable = False
    for value in (frozen, Immutable()):
        words = ["tensor `w` of rank 1, out: it is read-only", "hint: give one that can be written to"]
        assert raises(cm.ArrayError, words, lambda: job.start(plan, {}, {"w": value})) < allowed(2)
out = job.run(plan, {"w": np.arange(8, dtype=np.float32)} if rank == 0 else {})
assert rank == 0 or np.array_equal(out["w"], np.arange(8))
job.close()
""")


def test_jax_arrays_are_no_out():
    pytest.importorskip("jax", reason="jax is not installed: its arrays were not given as `out`")
    run(2, PLAN + """
import jax.numpy as jnp
job = cm.init()
if rank == 1:
    raises(cm.ArrayError, ["rank 1, out: it is read-only"], lambda: job.start(plan, {}, {"w": jnp.zeros(8, jnp.float32)}))
out = job.run(plan, {"w": jnp.arange(8, dtype=jnp.float32)} if rank == 0 else {})
assert rank == 0 or np.array_equal(out["w"], np.arange(8))
job.close()
""", timeout=60)


@pytest.mark.parametrize(
    "text, words",
    [
        ("f32[8]@A{x:2}(z)", ["`z`"]),
        ("f32[8]@A{x:2}(x+x)", ["x"]),
        ("f32[8]@A{x:2}(x | avg x)", ["avg"]),
        ("f3[8]@A{x:2}(x)", ["f3"]),
    ],
)
def test_layouts_point_at_what_is_wrong(text, words):
    with pytest.raises(cm.LayoutError) as error:
        cm.Layout.parse(text)
    said = str(error.value)
    assert all(word in said for word in words) and "^" in said, said


def test_placements_without_a_counterpart_are_named():
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    axes = {"dp": 2, "tp": 2}
    of = lambda *placements: cm.torch.layout_of(torch.float32, (8, 4), list(placements), axes)  # noqa: E731
    for placements, word in (((Partial("avg"), Replicate()), "avg"), ((_StridedShard(0, split_factor=3), Shard(0)), "3")):
        with pytest.raises(cm.LayoutError, match=word):
            of(*placements)


def test_counts_and_plans_that_differ():
    run(2, PLAN + """
job = cm.init()
wide = cm.plan({"w": ("f32[8]@A{x:4}=0-3(x)", "f32[8]@B{y:4}=4-7(y)")})
raises(cm.JobError, ["for 8 ranks, the job has 2", "nothing was moved", "hint"], lambda: job.start(wide, {}))
other = cm.plan({"w": ("f32[8]@A{x:1}=0(_)", "f32[8]@B{y:2}=0-1(y)")})
one = {"w": np.zeros(8, np.float32)} if rank == 0 else {}
took = raises(cm.JobError, ["r0 has plan", "r1 has plan", "nothing was moved"], lambda: job.run(plan if rank == 0 else other, one))
assert took < allowed(2), took
job.run(plan, one)
job.close()
""")


def test_torch_ranks_with_different_plans_are_told():
    """gloo would end the process."""
    pytest.importorskip("torch")
    run(2, """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dsts = ["f32[8]@B{y:1}=1(_)", "f32[8]@B{y:2}=0-1(y)"]
plan = cm.plan({"w": ("f32[8]@A{x:1}=0(_)", dsts[rank])})
dist.barrier()
start = time.monotonic()
try:
    cm.torch.reshard(plan, {"w": torch.zeros(8)} if rank == 0 else {})
except cm.JobError as error:
    assert "rank 0 has plan" in str(error) and "nothing was moved" in str(error), error
else:
    raise AssertionError
took = time.monotonic() - start
assert took < allowed(2), took
leave()
""", timeout=60)


def test_handles():
    """Twice, after `close`, in a fork."""
    run(2, PLAN + """
job = cm.init()
mine = {"w": np.ones(8, np.float32)} if rank == 0 else {}
handle = job.start(plan, mine)
handle.wait()
raises(cm.HandleError, ["waited for before"], handle.wait)
child = os.fork()
if child == 0:
    raises(cm.HandleError, ["forked", "hint"], handle.wait)
    raises(cm.HandleError, ["forked"], lambda: job.start(plan, mine))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
if rank == 1:
    # Rank 0 does not start it: it is under way for ever.
    late = job.start(plan, {})
    job.close()
    assert raises(cm.HandleError, ["closed with this transfer under way"], late.wait) < allowed(2)
    raises(cm.HandleError, ["the job is closed"], lambda: job.start(plan, {}))
""")


def test_a_peer_that_stalls_is_named():
    """Stopped, not dead, between two runs of a plan: nothing of the second moves for a second. Rank and tensor."""
    script = PLAN + """
job = cm.init(deadline_s=1.0)
mine = {"w": np.ones(8, np.float32)} if rank == 0 else {}
job.run(plan, mine)
print("here", flush=True)
sys.stdin.readline()
try:
    job.run(plan, mine)
except cm.CommError as error:
    print(error.culprit, error.tensor, time.monotonic(), flush=True)
"""
    with Ranks(2, script) as ranks:
        assert [ranks.line(rank) for rank in range(2)] == ["here", "here"]
        ranks.processes[0].send_signal(signal.SIGSTOP)
        ranks.processes[1].stdin.write("\n")
        ranks.processes[1].stdin.flush()
        start = time.monotonic()
        culprit, tensor, at = ranks.line(1).split()
        ranks.processes[0].send_signal(signal.SIGCONT)
    assert (culprit, tensor) == ("0", "w")
    assert float(at) - start < 1.0 + allowed(2), float(at) - start


def test_parts_of_a_sum_are_not_published():
    """The shard of one rank is an addend, not the value."""
    pytest.importorskip("torch")
    run(1, PLAN + f"""
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
dist.init_process_group("gloo")
parts = DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), [Partial()])
laid = (np.ones(4, np.float32), cm.Layout.parse("f32[4]@A{{tp:1}}=0(_ | max tp)"))
publisher = cm.sync.Publisher("127.0.0.1:{free_port()}", rank=0, size=1)
for tensors, word in (({{"w": torch.ones(2), "grad": parts}}, "parts of a sum over dp"), ({{"grad": laid}}, "parts of a max over tp")):
    raises(cm.sync.SyncError, ["`grad`: its shards are " + word, "hint"], lambda: publisher.offer(tensors))
publisher.offer({{"grad": parts.redistribute(placements=[Replicate()])}})
os._exit(0)
""", timeout=60)


def test_publishing_while_a_version_is_under_way_waits_its_turn():
    """Three at once: each arrives whole or not at all, the last one does."""
    run(2, f"""
address = "127.0.0.1:{free_port()}"
if rank == 0:
    weights = {{"w": np.zeros(1 << 20, np.float32)}}
    publisher = cm.sync.Publisher(address, rank=0, size=1)
    publisher.offer(weights)
    for version in (1, 2, 3):
        weights["w"][:] = version
        publisher.publish(version)
    publisher.wait(3, 20)
    try:
        publisher.publish(2)
    except cm.sync.SyncError as error:
        assert "version 2 is not above 3" in str(error) and "hint" in str(error)
    else:
        raise AssertionError
    time.sleep(0.3)
else:
    into = {{"w": np.zeros(1 << 20, np.float32)}}
    subscriber = cm.sync.Subscriber(address, into, rank=0, size=1)
    while subscriber.version != 3:
        if subscriber.poll(timeout_s=20):
            assert (into["w"] == (subscriber.version or 0)).all()
            version = subscriber.install()
            assert (into["w"] == version).all()
""", timeout=60)


def test_a_version_that_never_holds_is_an_error_with_tensor_and_rank():
    """Its bits are wrong every time: after three of them everybody is told, and no weight has changed."""
    run(2, f"""
import crossmesh.sync.subscriber
address = "127.0.0.1:{free_port()}"
def refused(call):
    for _ in range(100):
        try:
            call()
        except cm.sync.SyncError as error:
            assert "version 1: tensor `w[0:4]` of subscriber 0 is not what publisher 0 published" in str(error), error
            return
        time.sleep(0.1)
    raise AssertionError
if rank == 0:
    publisher = cm.sync.Publisher(address, rank=0, size=1)
    publisher.offer({{"w": np.ones(4, np.float32)}})
    publisher.publish(1)
    refused(lambda: publisher.wait(1, 20))
    time.sleep(0.5)
else:
    class Corrupts(cm.sync.Subscriber):
        def _on_check(self, said):
            self._slots["w"][0] = 7
            super()._on_check(said)
    into = {{"w": np.zeros(4, np.float32)}}
    subscriber = Corrupts(address, into, rank=0, size=1)
    refused(lambda: subscriber.poll(timeout_s=0.1))
    assert (into["w"] == 0).all() and subscriber.version is None
""", timeout=60)
