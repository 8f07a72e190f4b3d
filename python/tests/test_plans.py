"""Plans from Python say what the command says."""

import json
import subprocess
import sys

import pytest

import crossmesh as cm


def test_a_plan_is_proven_predicted_and_written():
    plan = cm.plan({"w": ("f32[64,64]@A{h:2,d:2}(h+d,_)", "f32[64,64]@B{h:2,d:2}(_,d)")}, nic="1Gbit")
    assert plan.verify().startswith("every element arrives exactly once")
    assert plan.gap == pytest.approx(plan.predicted_s / plan.lower_bound_s)
    doc = json.loads(plan.to_json())
    assert doc["schema"] == "crossmesh.plan/1" and len(doc["transfers"]) == plan.num_transfers
    assert "lower bound" in plan.explain() and plan.html().endswith("</html>\n")
    assert "iframe" in plan._repr_html_()


def test_a_document_comes_back(tmp_path):
    plan = cm.plan(("f32[8,6]@A{tp:2}(tp,_)", "f32[8,6]@B{tp:3}(_,tp)"))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    again = cm.read_plan(path)
    assert again.to_json() == plan.to_json() and again.fingerprint == plan.fingerprint
    other = cm.plan(("f32[8,6]@A{tp:2}(tp,_)", "f32[8,6]@B{tp:3}(_,tp)"), strategy="sendrecv")
    assert other.fingerprint != plan.fingerprint


def test_one_rank_at_a_time():
    plan = cm.plan(("f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)"))
    programs = [json.loads(plan.for_rank(rank)) for rank in range(plan.num_ranks)]
    sent = [op["tag"] for p in programs for r in p["ranks"] for op in r["ops"] if op["op"] == "send"]
    received = [op["tag"] for p in programs for r in p["ranks"] for op in r["ops"] if op["op"] == "recv"]
    assert sorted(sent) == sorted(received) == list(range(plan.num_transfers))
    with pytest.raises(IndexError, match="ranks 0 to 3"):
        plan.for_rank(4)


def test_shapes_of_shards():
    mesh = cm.Mesh("I", tp=2, ranks=[4, 5])
    fused = cm.Layout("bf16", (12, 4), mesh, ("tp of 8+2+2", None))
    assert fused.shard_shape(5) == [6, 4] and fused.boxes(5) == [[(4, 8), (0, 4)], [(9, 10), (0, 4)], [(11, 12), (0, 4)]]
    assert fused.holds(4) and not fused.holds(0)
    with pytest.raises(IndexError, match="rank 0 is not in mesh"):
        fused.shard_shape(0)
    uneven = cm.Layout.parse("f32[2]@A{tp:4}(tp)")
    assert [uneven.shard_shape(rank) for rank in range(4)] == [[1], [1], [0], [0]]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: cm.Layout.parse("f32[8]@A{tp:2}(dp)"), cm.LayoutError, "dp"),
        (lambda: cm.Layout("f31", (8,), "A{tp:2}", ("tp",)), cm.LayoutError, "unknown dtype `f31`"),
        (lambda: cm.plan(("f32[8]@A{tp:2}(tp)", "f16[8]@B{tp:2}(_)")), cm.PlanError, "differ in dtype"),
        (lambda: cm.plan(("f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)"), nic="fast"), cm.PlanError, "fast"),
        (lambda: cm.plan(("f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)"), strategy="magic"), cm.PlanError, "magic"),
        (lambda: cm.plan(("f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)"), cluster="no-such-file"), cm.PlanError, "no-such-file"),
    ],
)
def test_mistakes_are_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_importing_needs_neither_torch_nor_jax():
    code = "import sys, crossmesh; assert 'torch' not in sys.modules and 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
