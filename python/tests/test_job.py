"""Our engine from Python: what arrives, without copies, and what every mistake gets."""

import signal
import time

import pytest
from ranks import Ranks, allowed, run

PLAN = """
plan = cm.plan({"w": ("f32[8,6]@A{tp:2}=0-1(tp,_)", "f32[8,6]@B{tp:2}=1-2(_,tp)")})
full = np.arange(48, dtype=np.float32).reshape(8, 6)
mine = {"w": full[4 * rank:4 * rank + 4].copy()} if rank < 2 else {}
wanted = {1: full[:, :3], 2: full[:, 3:]}
"""


def test_arrays_of_numpy_with_strides_and_of_ours():
    said = run(3, PLAN + """
job = cm.init()
assert (job.rank, job.size, job.launcher) == (rank, 3, "torchrun") and len(job.hosts) == 3
assert str(job.cluster) == "[[host]]\\ndevices = 3"
for strided in (False, True):
    out = plan.empty(rank)
    if strided and "w" in out:
        room = np.full((20, 9), -1, np.float32)
        out = {"w": room[2:18:2, 1:7:2]}
        mine = {name: np.asfortranarray(value) for name, value in mine.items()}
    handle = job.start(plan, mine, out=out)
    report = handle.wait(timeout_s=20)
    assert handle.out is out and handle.test() and report.seconds > 0
    assert (rank == 0) <= (report.bytes_sent > 0) and (rank == 2) <= (report.bytes_received > 0)
    if "w" in out:
        assert np.array_equal(np.asarray(out["w"]), wanted[rank]), out
        if strided:
            assert (room == -1).sum() == 180 - 24
print(sorted(job.run(plan, mine)))
job.close()
job.close()
""")
    assert said == ["[]", "['w']", "['w']"]


def test_fused_boxes_lie_beside_each_other_in_any_dim():
    run(2, """
plan = cm.plan({"w": ("f32[4,6]@A{tp:2}=0-1(tp,_)", "f32[4,6]@B{tp:2}=0-1(_,tp of 4+2)")})
full = np.arange(24, dtype=np.float32).reshape(4, 6)
with cm.init() as job:
    out = job.run(plan, {"w": full[2 * rank:2 * rank + 2].copy()})
columns = [0, 1, 4] if rank == 0 else [2, 3, 5]
assert np.array_equal(out["w"].numpy(), full[:, columns]), out["w"].numpy()
""")


def test_random_shards_with_gaps_the_other_way_round():
    """Against slicing: dims reversed in memory, every second element of each."""
    run(2, """
rng = np.random.default_rng(0)
job = cm.init()
for number in range(40):
    shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
    dims = [["x" if dim == at else None for dim in range(len(shape))] for at in rng.integers(len(shape), size=2)]
    src, dst = [cm.Layout("f32", shape, cm.Mesh(name, x=2, ranks=range(2)), of) for name, of in zip("AB", dims)]
    full = rng.standard_normal(shape).astype(np.float32)
    cut = lambda layout: full[tuple(slice(a, b) for a, b in layout.boxes(rank)[0])]
    def spread(array):
        room = np.full([2 * n + 1 for n in reversed(array.shape)], 77, np.float32)
        view = room[tuple(slice(1, None, 2) for _ in array.shape)].transpose()
        view[...] = array
        return view
    mine = {"w": spread(cut(src))} if src.holds(rank) else {}
    out = {"w": spread(cut(dst) * 0)} if dst.holds(rank) else {}
    job.run(cm.plan({"w": (src, dst)}), mine, out, timeout_s=20)
    if out:
        assert np.array_equal(out["w"], cut(dst)), (number, str(src), str(dst))
job.close()
""")


def test_bits_of_what_numpy_does_not_know_and_awaited():
    run(2, """
import asyncio
plan = cm.plan(("bf16[64]@A{d:2}=0-1(d)", "bf16[64]@B{d:2}=0-1(_)"))
async def main(job):
    handles = [job.start(plan, {"": np.arange(32, dtype=np.uint16) + 32 * rank}) for _ in range(3)]
    reports = await asyncio.gather(*[asyncio.ensure_future(wait(h)) for h in handles])
    assert all(r.bytes_sent == 64 for r in reports)
    for h in handles:
        assert np.asarray(h.out[""]).dtype == np.uint16 and np.array_equal(h.out[""], np.arange(64))
async def wait(handle):
    return await handle
with cm.init() as job:
    asyncio.run(main(job))
""")


def test_no_copies():
    """256 MiB in and out: over a socket from foreign memory, and inside the host from ours."""
    said = run(2, """
import ctypes
MIB = 1 << 20
def unshared():
    ctypes.CDLL(None).malloc_trim(0)
    rollup = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return int(rollup["Private_Dirty"].split()[0]) / 1024
job = cm.init()
plan = cm.plan({"w": ("u8[268435456]@A{d:1}=0(_)", "u8[268435456]@B{d:1}=1(_)")})
for ours in (False, True):
    if ours:
        mine, out = plan.empty(rank, "src"), plan.empty(rank)
    else:
        mine = {"w": np.empty(256 * MIB, np.uint8)} if rank == 0 else {}
        out = {"w": np.empty(256 * MIB, np.uint8)} if rank == 1 else {}
    pointer = lambda a: np.asarray(a).__array_interface__["data"][0]
    for value in [*mine.values(), *out.values()]:
        np.asarray(value)[:] = np.arange(256 * MIB, dtype=np.uint32).astype(np.uint8) if rank == 0 else 0
    before, pointers = unshared(), [pointer(a) for a in [*mine.values(), *out.values()]]
    job.run(plan, mine, out)
    after = unshared()
    assert [pointer(a) for a in [*mine.values(), *out.values()]] == pointers
    for value in out.values():
        assert np.asarray(value)[12345] == 12345 % 256 and np.asarray(value)[-1] == 255
    print(round(after - before, 1))
    del mine, out, value
job.close()
""", timeout=60)
    grown = [float(text) for out in said for text in out.split()]
    assert len(grown) == 4 and max(grown) <= 16, grown


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    run(3, PLAN + """
import pathlib
marks = pathlib.Path(os.environ["MARKS"])
job = cm.init()
def refused(*words, **change):
    arrays = dict(mine=mine, out=plan.empty(rank)) | change
    try:
        job.start(plan, **arrays)
    except cm.ArrayError as error:
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(words)
refused("which the plan does not know", "`w`", mine={"v": full})
if rank == 0:
    refused("tensor `w` of rank 0, source: missing", mine={})
    refused("dtype f32 is expected, f64 was given", mine={"w": full[:4].astype(np.float64)})
    refused("shape [4, 6] is expected, [3, 6] was given", mine={"w": full[:3]})
    refused("big-endian", mine={"w": full[:4].astype(">f4")})
    refused("go backwards", mine={"w": full[3::-1]})
    refused("share memory", mine={"w": np.broadcast_to(full[:1], (4, 6))})
    refused("list is no array", mine={"w": [1.0]})
if rank == 2:
    flat = np.zeros((8, 3), np.float32)
    flat.flags.writeable = False
    refused("rank 2, out: it is read-only", out={"w": flat})
if rank == 1:
    both = np.zeros((8, 6), np.float32)
    refused("shares memory with", mine={"w": both[:4]}, out={"w": both[:, 3:]})
# None of it has harmed anybody.
out = job.run(plan, mine)
if rank == 0:
    while len(list(marks.iterdir())) < 2:
        time.sleep(0.01)
    first, second = job.start(plan, mine), job.start(plan, mine)  # two readers
else:
    out = plan.empty(rank)
    first = job.start(plan, mine, out)
    refused("a transfer under way has its memory", out=out)
    (marks / str(rank)).touch()
    second = job.start(plan, mine)
first.wait(); second.wait()
job.close()
""", MARKS=tmp_path)


def test_ranks_that_disagree_are_told_and_nothing_moves():
    run(2, """
job = cm.init()
plan = lambda dst: cm.plan(("f32[8]@A{x:2}=0-1(x)", dst))
mine = {"": np.zeros(4, np.float32)}
start = time.monotonic()
for rounds in range(2):
    try:
        job.run(plan("f32[8]@B{y:2}=0-1(_)" if rank == 0 else "f32[8]@B{y:2}=0-1(y)"), mine)
    except cm.JobError as error:
        assert "r0 has plan" in str(error) and "r1 has plan" in str(error) and "nothing was moved" in str(error), error
    else:
        raise AssertionError
wide = cm.plan(("f32[8]@A{x:4}=0-3(x)", "f32[8]@B{y:2}=0-1(_)"))
try:
    job.start(wide, mine)
except cm.JobError as error:
    assert "for 4 ranks, the job has 2" in str(error)
assert time.monotonic() - start < 2
out = job.run(plan("f32[8]@B{y:2}=0-1(_)"), mine)
assert np.array_equal(out[""], np.zeros(8))
job.close()
""")


def test_handles_are_waited_for_once_here_and_in_time():
    run(2, """
import gc
job = cm.init()
try:
    cm.init()
except cm.JobError as error:
    assert "in a job already" in str(error)
plan = cm.plan(("f32[8]@A{x:1}=0(_)", "f32[8]@B{y:1}=1(_)"))
mine = {"": np.ones(8, np.float32)} if rank == 0 else {}
def raises(call, kind, words):
    start = time.monotonic()
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
    assert time.monotonic() - start < 2
if rank == 1:
    handle = job.start(plan, mine)
    raises(lambda: handle.wait(timeout_s=0.2), TimeoutError, "goes on after 0.2 s")
    print("waits", flush=True)
    report = handle.wait()
else:
    time.sleep(0.5)
    handle = job.start(plan, mine)
    del mine
    gc.collect()
    handle.wait()
raises(handle.wait, cm.HandleError, "waited for before")
pid = os.fork()
if pid == 0:
    try:
        raises(handle.wait, cm.HandleError, "forked")
        raises(lambda: job.start(plan, {}), cm.HandleError, "forked")
        del handle
        job.close()
        os._exit(7)
    finally:
        os._exit(8)
assert os.waitpid(pid, 0)[1] == 7 << 8
handle = job.start(plan, {"": np.ones(8, np.float32)} if rank == 0 else {})
handle.wait()
job.close()
raises(lambda: job.start(plan, {}), cm.HandleError, "closed")
""")


LONG = """
plan = cm.plan({"w": ("f32[8]@A{x:1}=0(_)", "f32[8]@B{y:1}=1(_)")})
job = cm.init()
print("here", flush=True)
"""
TOLD = """
    try:
        job.run(plan, {})
    except cm.CommError as error:
        print(error.culprit, time.monotonic(), flush=True)
        time.sleep(0.1)
        sys.exit(3)
"""


@pytest.mark.parametrize("how", ["kill", "interrupt", "exit"])
def test_a_rank_that_goes_is_named_by_the_others_in_time(how):
    """Rank 0 never sends what ranks 1 and 2 wait for, or agree on."""
    script = LONG + f"""
if rank == 0:
    sys.stdin.readline()
    if {how!r} == "exit":
        handle = job.start(plan, {{"w": np.ones(8, np.float32)}})
        print("exits", flush=True)
        sys.exit(0)
    if {how!r} == "interrupt":
        other = cm.plan({{"w": ("f32[8]@A{{x:1}}=1(_)", "f32[8]@B{{y:1}}=0(_)")}}, cluster=cm.Cluster(1, 2))
        handle = job.start(other, {{}})
        try:
            print("waits", flush=True)
            handle.wait()
        except KeyboardInterrupt:
            print("interrupted", time.monotonic(), flush=True)
            sys.exit(5)
    time.sleep(60)
else:
    if {how!r} == "interrupt":
        sys.stdin.readline()
{TOLD}
"""
    with Ranks(3, script) as ranks:
        assert [ranks.line(rank) for rank in range(3)] == ["here"] * 3
        if how != "kill":
            ranks.processes[0].stdin.write("\n")
            ranks.processes[0].stdin.flush()
            assert ranks.line(0) in ("exits", "waits")
        else:
            time.sleep(0.3)
        start = time.monotonic()
        if how == "kill":
            ranks.processes[0].kill()
        if how == "interrupt":
            time.sleep(0.2)  # until it waits
            ranks.processes[0].send_signal(signal.SIGINT)
            ranks.processes[0].wait(10)
            for process in ranks.processes[1:]:  # else they would hear of another plan
                process.stdin.write("\n")
                process.stdin.flush()
        ends = ranks.ends()
    if how == "exit":
        # It had nothing to wait for: the transfer may have come to its end before.
        assert ends[0][0] == 0, ends
        return
    # By their own clocks, which are one: how long Python takes to end says nothing.
    said = [out.split() for _, out, _ in ends[1:]]
    assert [code for code, *_ in ends[1:]] == [3, 3] and [words[0] for words in said] == ["0", "0"], ends
    heard = [float(words[1]) - start for words in said]
    if how == "interrupt":
        assert ends[0][0] == 5 and ends[0][1].split()[0] == "interrupted", ends
        heard = [float(ends[0][1].split()[1]) - start]
    assert max(heard) < allowed(2), heard
