use crossmesh_core::reshard::*;
use crossmesh_core::sim::simulate;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let p = Problem::pair(a[1].parse().unwrap(), a[2].parse().unwrap()).unwrap();
    let b = lower_bound(&p).unwrap();
    eprintln!("bound {b:?}");
    let plan = plan(&p, &PlanOptions { ..Default::default() }).unwrap();
    eprintln!("planned {} chunk {} {:?}", plan.transfers().len(), plan.chunk_bytes, plan.reasons);
    let t = simulate(&lower(&plan), &p.cluster).unwrap();
    eprintln!("{}", t.makespan_s / b.seconds);
    if a.len() > 3 {
        for t in plan.transfers() {
            println!(
                "{} -> {} lane {} {} {} w{} {:?}",
                t.src,
                t.dst,
                t.lane,
                plan.region(t),
                t.bytes,
                t.weight,
                plan.after(t)
            );
        }
    }
}
