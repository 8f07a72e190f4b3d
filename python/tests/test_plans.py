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


def test_a_plan_is_simulated_on_other_clusters(tmp_path):
    plan = cm.plan(("f32[4096,4096]@A{tp:2}(tp,_)", "f32[4096,4096]@B{tp:2}(_,tp)"), cluster=cm.Cluster(2, 2, nic="10Gbit"))
    own = plan.simulate()
    assert own.predicted_s == plan.predicted_s and own.lower_bound_s == plan.lower_bound_s and own.gap == plan.gap
    faster = plan.simulate(nic="20Gbit")
    assert faster.predicted_s == pytest.approx(own.predicted_s / 2, rel=1e-3)
    path = tmp_path / "cluster.toml"
    path.write_text(str(cm.Cluster(4, 1, nic="20Gbit")))
    elsewhere = plan.simulate(path)
    assert elsewhere.predicted_s == plan.simulate(cm.Cluster(4, 1, nic="20Gbit")).predicted_s < faster.predicted_s
    # What the command says, of the same plan.
    document = tmp_path / "plan.json"
    document.write_text(plan.to_json())
    command = [sys.executable, "-m", "crossmesh", "simulate", str(document), "--cluster", str(path)]
    said = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    assert str(elsewhere) == said and "predicted" in said
    doc = json.loads(elsewhere.to_json())
    assert doc["schema"] == "crossmesh.simulation/1" and doc["predicted_s"] == elsewhere.predicted_s
    assert json.loads(elsewhere.trace())["traceEvents"]
    with pytest.raises(cm.PlanError, match="the plan uses ranks up to 3, the cluster has 2 devices"):
        plan.simulate(cm.Cluster(1, 2))
    with pytest.raises(cm.PlanError, match="fast"):
        plan.simulate(nic="fast")


def test_shapes_of_shards():
    mesh = cm.Mesh("I", tp=2, ranks=[4, 5])
    fused = cm.Layout("bf16", (12, 4), mesh, ("tp of 8+2+2", None))
    assert fused.shard_shape(5) == [6, 4] and fused.boxes(5) == [[(4, 8), (0, 4)], [(9, 10), (0, 4)], [(11, 12), (0, 4)]]
    assert fused.holds(4) and not fused.holds(0)
    with pytest.raises(IndexError, match="rank 0 is not in mesh"):
        fused.shard_shape(0)
    uneven = cm.Layout.parse("f32[2]@A{tp:4}(tp)")
    assert [uneven.shard_shape(rank) for rank in range(4)] == [[1], [1], [0], [0]]
    # Beside each other along the dim that is fused, whichever that is; an empty shard has the other dims still.
    experts = cm.Layout.parse("bf16[2,6,3]@I{ep:1,tp:2}(ep,tp of 4+2,_)")
    assert experts.shard_shape(1) == [2, 3, 3] and experts.local_boxes(1) == [[(0, 2), (0, 2), (0, 3)], [(0, 2), (2, 3), (0, 3)]]
    few = cm.Layout.parse("f32[4,2]@A{tp:3}(_,tp)")
    assert few.shard_shape(2) == [4, 0] and few.local_boxes(2) == []
    # Boxes with places of their own are no array, and what is made for them is a row.
    for placed in ("[0:4, 0:2] by 1,4", "[0:4, 0:2] at 1", "[0:4, 0:1] [0:2, 1:2]"):
        plan = cm.plan(("f32[4,2]@A{x:1}=0(_,_)", f"f32[4,2]@B{{x:1}}=0{{0: {placed}}}"))
        with pytest.raises(cm.LayoutError, match="one row of `shard_elements`"):
            plan.tensors[0][2].shard_shape(0)
        assert plan.empty(0)[""].shape == [plan.tensors[0][2].shard_elements(0)]


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


@pytest.mark.parametrize(
    ("pairs", "options", "number"),
    [
        (("f32[8]@A{x:2}=0-1(x)", "f32[8]@B{y:2}=1,0(y)"), {}, 1973353815528484730),
        (
            {"w": ("bf16[6,4]@A{d:2,t:2}(d,_ | sum t)", "bf16[6,4]@B{r:3}(r,_)"), "é": ("u8[]@A{d:2,t:2}()", "u8[]@B{r:3}()")},
            {"devices_per_host": 2},
            4646022213097645352,
        ),
    ],
)
def test_a_fingerprint_is_the_same_number_on_every_machine(pairs, options, number):
    """Written down: ranks of different machines and builds compare theirs."""
    assert cm.plan(pairs, **options).fingerprint == number
