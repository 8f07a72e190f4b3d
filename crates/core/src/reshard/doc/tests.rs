use super::*;
use crate::id::{Rank, TransferId};
use crate::region::{Region, Span};
use crate::reshard::{PlanError, Problem};

/// Two ranks to two: a box over the NIC, then inside the host.
fn plan() -> Plan {
    let src = "f32[4,2]@A{x:2}(x,_)".parse().unwrap();
    let problem = Problem::pair(src, "f32[4,2]@B{x:2}(_,_)".parse().unwrap()).unwrap();
    let mut plan = Plan::new(problem, "by hand", 4096);
    plan.reasons.push("to have \"one\"".into());
    for part in 0..2 {
        let rows = Span::new(2 * part, 2 * part + 2);
        let region = plan.add_region(Region::new(vec![rows, Span::new(0, 2)]));
        let first = plan.add(0, Rank(part as u32), Rank(2), region, &[]);
        plan.add(0, Rank(2), Rank(3), region, &[first]);
    }
    plan.transfer_mut(TransferId(2)).weight = 7;
    plan
}

fn text(plan: &Plan) -> String {
    let figures = Figures { lower_bound_s: 1.0 / 3.0, predicted_s: 1.28e-8, peak_extra_bytes: 64 };
    PlanDoc::new(plan, figures).to_json()
}

/// The error for the document with one text in place of another.
fn error(old: &str, new: &str) -> PlanDocError {
    let text = text(&plan());
    assert!(text.contains(old), "{old} is not in {text}");
    PlanDoc::parse(&text.replacen(old, new, 1)).and_then(|doc| doc.to_plan()).unwrap_err()
}

#[test]
fn a_plan_survives_the_round_trip() {
    let plan = plan();
    let doc = PlanDoc::parse(&text(&plan)).unwrap();
    assert_eq!(doc.to_plan().unwrap(), plan);
    assert_eq!(doc.to_json(), text(&plan));
    assert_eq!(doc.lower_bound_s, 1.0 / 3.0);
}

#[test]
fn several_tensors_and_a_described_cluster_survive_too() {
    let layout = |s: &str| s.parse().unwrap();
    let pairs = vec![
        ("w".into(), layout("f32[4]@A{x:2}(_ | sum x)"), layout("f32[4]@B{x:2}(x)")),
        (String::new(), layout("bf16[]@B{x:2}()"), layout("bf16[]@A{x:2}()")),
    ];
    let mut problem = Problem::new(pairs, crate::reshard::problem::Hosts::default()).unwrap();
    problem.cluster.hosts[1].nics = 2;
    problem.cluster.hosts[1].memory_bytes = Some(1 << 40);
    problem.cluster.latency_s = 0.1 + 0.2;
    problem.cluster.measured = Some("a rack of ours".into());
    problem.cluster.tiers.push(crate::cluster::Tier {
        name: "leaf".into(),
        groups: vec![crate::cluster::Group {
            hosts: vec![crate::id::HostId(1)],
            out_bytes_per_s: 1e9 / 3.0,
            in_bytes_per_s: 2e9,
        }],
    });
    problem.topology = crate::cluster::Topology::new(&problem.cluster);
    let mut plan = Plan::new(problem, "by hand", 1);
    let region = plan.add_region(Region::new(vec![Span::new(0, 2)]));
    let t0 = plan.add(0, Rank(0), Rank(1), region, &[]);
    plan.transfer_mut(t0).reduce = true;
    let scalar = plan.add_region(Region::new(vec![]));
    plan.add(1, Rank(2), Rank(0), scalar, &[t0]);
    let text = text(&plan);
    assert!(text.contains("\"reduce\":\"sum\"") && !text.contains("\n  \"src\""));
    assert_eq!(PlanDoc::parse(&text).unwrap().to_plan().unwrap(), plan);
}

#[test]
fn what_tensors_cost_survives_and_changes_no_plan() {
    let plan = plan();
    let figures = Figures { lower_bound_s: 1.0 / 3.0, predicted_s: 1.28e-8, peak_extra_bytes: 64 };
    let cost = CostDoc {
        bytes_moved: 192,
        transfers: 6,
        start_s: 0.1,
        end_s: 0.3,
        share_of_busiest_link: 1.0 / 3.0,
    };
    let doc = PlanDoc::new(&plan, figures).with_costs("h0 nic out".into(), [cost]);
    let text = doc.to_json();
    assert!(
        text.contains("\"busiest_link\": \"h0 nic out\"") && text.contains("\"cost\":{\"bytes_moved\":192")
    );
    let read = PlanDoc::parse(&text).unwrap();
    assert_eq!(read, doc);
    assert_eq!(read.to_plan().unwrap(), plan);
}

#[test]
fn a_reader_does_without_the_extensions() {
    let text = r#"{ "schema": "crossmesh.plan/1", "src": "f32[4]@A{x:2}(x)", "dst": "f32[4]@B{x:1}(_)",
        "strategy": "flow", "bytes": 16, "lower_bound_s": 0, "predicted_s": 0, "peak_extra_bytes": 0,
        "devices": [{"rank": 0, "host": 0}, {"rank": 1, "host": 0}, {"rank": 2, "host": 1, "meshes": ["B"]}],
        "transfers": [
          {"id": 0, "src": 0, "dst": 2, "region": [[0, 2]], "bytes": 8, "link": "nic", "after": []},
          {"id": 4, "src": 1, "dst": 2, "region": [[2, 4]], "bytes": 8, "link": "nic", "after": [0]}] }"#;
    let plan = PlanDoc::parse(text).unwrap().to_plan().unwrap();
    assert_eq!(plan.problem.cluster.hosts.iter().map(|h| h.devices).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(plan.after(&plan.transfers()[1]), [TransferId(0)]);
}

#[test]
fn refuses_other_schemas() {
    let newer = error("crossmesh.plan/1", "crossmesh.plan/2");
    assert_eq!(newer, PlanDocError::NewerSchema { schema: "crossmesh.plan/2".into() });
    assert!(newer.to_string().contains("newer"));
    for other in ["crossmesh.plan/0", "crossmesh.schedule/1", "", "crossmesh.plan/1.5"] {
        assert_eq!(error("crossmesh.plan/1", other), PlanDocError::UnknownSchema { schema: other.into() });
    }
    for garbage in ["", "[]", "{", "{}", "null", "{\"schema\": 1}", "{\"schema\": \"crossmesh.plan/1\"}"] {
        assert!(matches!(PlanDoc::parse(garbage), Err(PlanDocError::Json { .. })), "{garbage}");
    }
}

#[test]
fn refuses_transfers_that_contradict_themselves() {
    use PlanDocError::*;
    assert_eq!(error("\"id\":1", "\"id\":0"), IdTwice { id: 0 });
    assert_eq!(error("\"id\":0", "\"id\":9"), IdOrder { id: 1, previous: 9 });
    assert_eq!(error("\"dst\":3", "\"dst\":9"), Rank { id: 1, field: "dst", rank: 9, devices: 4 });
    assert_eq!(error("[[0,2],[0,2]]", "[[0,2]]"), RegionDims { id: 0, found: 1, dims: 2 });
    assert_eq!(error("[[0,2],[0,2]]", "[[0,2],[2,0]]"), RegionBackwards { id: 0, dim: 1, start: 2, end: 0 });
    assert_eq!(error("[[0,2],[0,2]]", "[[0,9],[0,2]]"), RegionOutside { id: 0, dim: 0, end: 9, dim_len: 4 });
    assert_eq!(error("[[0,2],[0,2]]", "[[0,1],[0,2]]"), Bytes { id: 0, stated: 16, region_bytes: 8 });
    assert_eq!(error("\"weight\":7", "\"weight\":0"), WeightZero { id: 2 });
    assert_eq!(error("\"after\":[2]", "\"after\":[4]"), UnknownAfter { id: 3, after: 4 });
    assert!(matches!(error("\"local\"", "\"nic\""), Link { id: 1, stated: "nic", .. }));
    assert!(matches!(error("\"weight\":7", "\"reduce\":\"sum\""), Reduce { id: 2, .. }));
    assert!(matches!(error("\"weight\":7", "\"tensor\":1"), Tensor { id: 2, .. }));
    assert!(matches!(error("\"src\":0", "\"src\":-1"), Json { .. }));
    assert!(matches!(error("\"src\":0", "\"src\":4294967296"), Json { .. }));
}

#[test]
fn refuses_what_the_layouts_and_the_cluster_contradict() {
    use PlanDocError::*;
    assert!(matches!(error("\"src\": \"f32[4,2]", "\"src\": \"f32[5,2]"), TensorsContradict { .. }));
    assert!(matches!(error("\"meshes\":[\"A\"]", "\"meshes\":[\"B\"]"), DeviceMeshes { rank: 0, .. }));
    assert!(matches!(error("\"host\":0", "\"host\":1"), DeviceHost { rank: 0, host: 1, .. }));
    assert!(matches!(error("\"rank\":1", "\"rank\":2"), DeviceOrder { expected: 1, found: 2 }));
    assert!(matches!(error("\"devices\":2", "\"devices\":0"), Cluster { field: "hosts[].devices", .. }));
    assert!(matches!(error("\"devices\":2", "\"devices\":3"), DeviceCount { .. } | DeviceHost { .. }));
    assert!(matches!(error("\"devices\":2", "\"devices\":1"), Problem(PlanError::MeshBeyondCluster { .. })));
    assert!(matches!(error("\"nics\":1", "\"nics\":4000000000"), Cluster { field: "hosts[].nics", .. }));
    assert!(matches!(error("\"count\":2", "\"count\":4000000000"), Cluster { field: "hosts[].count", .. }));
    assert!(matches!(error("\"latency_s\":0.0", "\"latency_s\":-1"), Cluster { field: "latency_s", .. }));
    assert!(matches!(error("\"chunk_bytes\": 4096", "\"chunk_bytes\": 0"), Figure { .. }));
    assert!(matches!(error("\"predicted_s\": 1.28e-8", "\"predicted_s\": -1"), Figure { .. }));
}

#[test]
fn never_panics_on_damaged_text() {
    let text = text(&plan());
    let bytes = text.as_bytes();
    for at in 0..bytes.len() {
        for damage in [b'9', b'"', b'-', b'0', b'}'] {
            let mut damaged = bytes.to_vec();
            damaged[at] = damage;
            let Ok(damaged) = String::from_utf8(damaged) else { continue };
            let _ = PlanDoc::parse(&damaged).and_then(|doc| doc.to_plan());
        }
        let _ = PlanDoc::parse(&text[..at]);
    }
}
