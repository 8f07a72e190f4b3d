use crossmesh_core::reshard::problem::*;
use crossmesh_core::reshard::*;
use crossmesh_core::sim::simulate;
fn main() {
    let cases = [
        ("i32[268435456]@A{d:1}(_)", "i32[268435456]@B{h:1,d:4}(_)"),
        ("i32[268435456]@A{d:1}(_)", "i32[268435456]@B{h:4,d:2}(_)"),
        ("i32[1024,1024,512]@A{h:2,d:4}(h,_,_)", "i32[1024,1024,512]@B{h:2,d:4}(h,_,_)"),
        ("i32[1024,1024,512]@A{h:2,d:4}(_,_,_)", "i32[1024,1024,512]@B{h:2,d:4}(h,_,_)"),
        ("i32[1024,1024,512]@A{h:2,d:4}(_,h,_)", "i32[1024,1024,512]@B{h:2,d:4}(h,_,_)"),
        ("i32[1024,1024,512]@A{h:2,d:4}(_,h+d,_)", "i32[1024,1024,512]@B{h:2,d:4}(h+d,_,_)"),
        ("i32[1024,1024,512]@A{h:2,d:4}(d,_,_)", "i32[1024,1024,512]@B{h:2,d:4}(h,_,_)"),
        ("i32[3072,1024,170]@A{h:2,d:4}(h,_,_)", "i32[3072,1024,170]@B{h:3,d:4}(h,_,_)"),
        ("i32[1024,1024,512]@A{h:1,d:4}(d,_,_)", "i32[1024,1024,512]@B{h:2,d:4}(_,_,_)"),
        ("i32[1024,1024,512]@A{h:2,d:4}(_,h,_)", "i32[1024,1024,512]@B{h:2,d:4}(_,_,h)"),
    ];
    for (src, dst) in cases {
        let p = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        let b = lower_bound(&p).unwrap();
        print!("{:.3}s {:<30}", b.seconds, b.reason);
        for s in Strategy::CONCRETE {
            let plan = plan(&p, &PlanOptions { strategy: s, ..Default::default() }).unwrap();
            let t = simulate(&lower(&plan), &p.cluster).unwrap();
            print!(" {:>6.3}", t.makespan_s / b.seconds);
            if s == Strategy::Flow {
                print!(" n={} c={} {:?}", plan.transfers().len(), plan.chunk_bytes, plan.reasons);
            }
        }
        println!();
    }
}
