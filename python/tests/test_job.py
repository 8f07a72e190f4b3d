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


def test_what_passes_is_protected_where_it_is_asked_for():
    script = "cm.init(arrive_s=20).close()"
    run(2, script, CROSSMESH_PROTECT="encrypt", CROSSMESH_HOST="h")
    odd = "os.environ['CROSSMESH_PROTECT'] = 'sign' if rank else 'none'\n"
    how = "cm.init(protect='sign' if rank else None, arrive_s=20)"
    for script in (odd + "cm.init(arrive_s=20)", how):
        with Ranks(2, script) as ranks:
            code, _, error = ranks.processes[1].wait(30), None, ranks.processes[1].stderr.read()
        assert code == 1 and "the other side has --protect none, this one sign" in error, error
    with Ranks(1, "cm.init(protect='aes')") as ranks:
        (code, _, error), = ranks.ends()
    assert code == 1 and "`aes` is no way to protect a connection" in error, error


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


PEAK = """
import threading
MIB = 1 << 20
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) / 1024
class Peak:
    # The most memory that this process had inside the block, beyond what it had at its start, in MiB: `resident` with what it maps of
    # others', by the system's own mark, which is set back first; `private` by looking every millisecond.
    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self.resident, self.private, self.over = -status("VmRSS"), 0, threading.Event()
        self.looks = threading.Thread(target=self.look)
        self.looks.start()
        return self
    def look(self):
        before = status("RssAnon")
        while not self.over.wait(0.001):
            self.private = max(self.private, status("RssAnon") - before)
    def __exit__(self, *_):
        self.over.set()
        self.looks.join()
        self.resident += status("VmHWM")
"""


def test_no_copies():
    """256 MiB in and out: over a socket from foreign memory, with gaps or without, and inside the host from ours. What is there for a
    moment only counts, too: a copy that is made and dropped is seen (the first block makes one).
    """
    pytest.importorskip("torch", reason="torch is not installed: its tensors were not moved")
    said = run(2, PEAK + """
import torch
shape, bytes_of = (4096, 65536), 256 * MIB
job = cm.init()
plan = cm.plan({"w": ("u8[4096,65536]@A{d:1}=0(_,_)", "u8[4096,65536]@B{d:1}=1(_,_)")})
def of_torch():
    return torch.ones(shape, dtype=torch.uint8)
def with_gaps():
    return np.ones((shape[0], shape[1] + 512), np.uint8)[:, 256:-256]
def of_numpy():
    return np.ones(shape, np.uint8)
kinds = {"numpy": of_numpy, "torch": of_torch, "gaps": with_gaps, "ours": None}
for kind, make in kinds.items():
    mine, out = plan.empty(rank, "src"), plan.empty(rank)
    if make:
        mine, out = {name: make() for name in mine}, {name: make() for name in out}
    (value,) = [*mine.values(), *out.values()]
    array = np.asarray(value)
    array[:] = np.arange(shape[1]).astype(np.uint8) if rank == 0 else 0
    if kind == "numpy":
        # Who looks may be kept from looking now and then, not each time.
        seen = []
        while not any(private > 128 for _, private in seen) and len(seen) < 10:
            with Peak() as peak:
                array.copy()
            seen.append((peak.resident, peak.private))
        # The system counts pages in batches: what is resident is known to some MiB.
        assert all(resident > 200 for resident, _ in seen) and max(seen, key=lambda both: both[1])[1] > 128, seen
    pointer = lambda: np.asarray(value).__array_interface__["data"][0]
    at = pointer()
    with Peak() as peak:
        job.run(plan, mine, out)
    assert pointer() == at
    assert (array[17] == np.arange(shape[1]).astype(np.uint8)).all() and array[-1, -1] == 255
    # Of ours, the receiver maps what the sender has: those are no further pages.
    mapped = 256 if kind == "ours" and rank == 1 else 0
    print(kind, round(peak.resident - mapped, 1), round(peak.private, 1))
    del mine, out, value, array
job.close()
""", timeout=120)
    grown = [line.split() for out in said for line in out.splitlines()]
    assert len(grown) == 8 and max(float(n) for _, *both in grown for n in both) <= 16, grown


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
assert time.monotonic() - start < allowed(2)
out = job.run(plan("f32[8]@B{y:2}=0-1(_)"), mine)
assert np.array_equal(out[""], np.zeros(8))
job.close()
""")


def test_handles_are_waited_for_once_here_and_in_time(tmp_path):
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
    assert time.monotonic() - start < allowed(2)
if rank == 1:
    handle = job.start(plan, mine)
    raises(lambda: handle.wait(timeout_s=0.2), TimeoutError, "goes on after 0.2 s")
    open(os.environ["MARK"], "w").close()
    report = handle.wait()
else:
    while not os.path.exists(os.environ["MARK"]):
        time.sleep(0.02)
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
""", MARK=tmp_path / "waited")


LONG = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
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


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_rank_that_goes_is_named_by_the_others_in_time(how):
    """Rank 0 never sends what ranks 1 and 2 wait for, or agree on."""
    script = LONG + f"""
if rank == 0:
    sys.stdin.readline()
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
            assert ranks.line(0) == "waits"
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
    # By their own clocks, which are one: how long Python takes to end says nothing.
    said = [out.split() for _, out, _ in ends[1:]]
    assert [code for code, *_ in ends[1:]] == [3, 3] and [words[0] for words in said] == ["0", "0"], ends
    heard = [float(words[1]) - start for words in said]
    if how == "interrupt":
        assert ends[0][0] == 5 and ends[0][1].split()[0] == "interrupted", ends
        heard = [float(ends[0][1].split()[1]) - start]
    assert max(heard) < allowed(2), heard


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_exits_with_a_transfer_in_flight(who):
    """It ends well and in time; whoever waits hears who left and how, and so does a rank that comes to the transfer later."""
    script = f"""
# Rank 2 has to send, too: as long as it does not start the plan, it is under way on both others.
plan = cm.plan({{"w": ("f32[8]@A{{x:1}}=0(_)", "f32[8]@B{{y:2}}=1-2(y)"), "v": ("f32[8]@C{{x:1}}=2(_)", "f32[8]@D{{y:2}}=0-1(_)")}})
mine = {{0: {{"w": np.ones(8, np.float32)}}, 2: {{"v": np.ones(8, np.float32)}}}}.get(rank, {{}})
job = cm.init()
job.run(plan, mine)  # now all know it, and a start is a start
if rank == 2:
    print("waits", flush=True)
    sys.stdin.readline()
out = plan.empty(rank)
try:
    handle = job.start(plan, mine, out)
    if rank == {who}:
        while rank == 1 and not out["w"].numpy().any():
            time.sleep(0.001)  # until some of it is here
        assert not handle.test()
        print(time.monotonic(), flush=True)
        sys.exit(0)
    print("waits", flush=True)
    handle.wait()
except cm.CommError as error:
    print(error.culprit, time.monotonic(), "it left with a transfer under way" in str(error), flush=True)
"""
    with Ranks(3, script) as ranks:
        assert [ranks.line(rank) for rank in (1 - who, 2)] == ["waits"] * 2
        left = float(ranks.line(who))
        assert ranks.processes[who].wait(30) == 0
        took = [time.monotonic() - left]
        ranks.processes[2].stdin.write("\n")
        ranks.processes[2].stdin.flush()
        started = time.monotonic()
        ends = ranks.ends()
    for rank, since in ((1 - who, left), (2, started)):
        code, out, err = ends[rank]
        culprit, at, words = out.split()[-3:]
        assert (code, culprit, words) == (0, str(who), "True"), (rank, out, err)
        took.append(float(at) - since)
    assert max(took) < allowed(2), took
