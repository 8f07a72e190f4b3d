//! What is to be planned: layouts placed on the ranks of a cluster.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::{Cluster, Host, Topology};
use crate::id::Rank;
use crate::layout::Layout;
use crate::mesh::{Mesh, RankList};
use crate::region::Region;

use super::coverage;
use super::shares::shares;

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    #[error(
        "source and destination differ in dtype: {src} and {dst}\nhint: converting on the way is not supported; convert before or after"
    )]
    DTypeDiffers { src: String, dst: String },
    #[error("source and destination differ in shape: {src} and {dst}")]
    ShapeDiffers { src: String, dst: String },
    #[error(
        "a destination of parts that {src} does not have: {dst}\n  {why}\nhint: as many parts as the source has, or a number that divides them; or name the layout in which whole values are wanted"
    )]
    PartialDestination { src: String, dst: String, why: String },
    #[error(
        "mesh `{name}` is given twice with different axes or ranks: {first} and {second}\nhint: use two names for two meshes"
    )]
    MeshRedefined { name: String, first: String, second: String },
    #[error(
        "mesh {mesh} needs ranks up to {last}, the cluster has {devices} devices, whose ranks count from 0\nhint: list the mesh's ranks ({name}{{..}}=0-3), or describe a larger cluster"
    )]
    MeshBeyondCluster { mesh: String, name: String, last: u32, devices: usize },
    #[error(
        "rank {rank} of mesh {mesh} leaves {gap} ranks below it without a device\nhint: ranks are dense; without a cluster file a mesh lists ranks at most one above those in use"
    )]
    RankGap { mesh: String, rank: u32, gap: u32 },
    #[error(
        "nobody holds {region}{what}, which {rank} wants\n  {layouts}\nhint: list it for a device of the source, or nobody should want it"
    )]
    NobodyHolds { region: Region, what: Box<str>, rank: Rank, layouts: Box<str> },
    #[error(
        "{rank} wants {region} twice: in {first} and in {second}\n  {dst}\nhint: a device receives an element once; cut one of the boxes short"
    )]
    WantedTwice { rank: Rank, region: Region, first: Box<Region>, second: Box<Region>, dst: Box<str> },
    #[error(
        "rank {rank} of mesh {mesh} and a rank offset of {offset} make {}, which is too large\nhint: ranks go up to {}", u64::from(*rank) + u64::from(*offset), u32::MAX - 1
    )]
    OffsetTooLarge { mesh: String, rank: u32, offset: u32 },
    #[error("there is nothing to plan: no tensor was given")]
    NoTensors,
    #[error("strategy `{strategy}` cannot combine the partial sums of {src}\nhint: use `flow`")]
    CannotReduce { strategy: String, src: String },
    #[error(
        "extra memory of {needed} B on {rank} cannot be brought under the limit of {limit} B: the smallest box is {smallest} B\nhint: raise --max-extra-bytes to at least {needed}"
    )]
    OverBudget { rank: Rank, needed: u64, limit: u64, smallest: u64 },
    #[error("the plan would have more than {limit} {what}\nhint: plan fewer tensors at a time")]
    TooLarge { what: &'static str, limit: u64 },
    #[error("a chunk of {0} B cannot move anything\nhint: give at least 1 KiB")]
    ChunkTooSmall(u64),
}

/// A layout whose mesh has its ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    pub layout: Layout,
    /// In mesh order, row-major.
    pub ranks: Vec<Rank>,
}

/// One tensor's move from a layout to another.
#[derive(Debug, Clone, PartialEq)]
pub struct Reshard {
    /// Empty where the user gave none.
    pub name: String,
    pub src: Placed,
    pub dst: Placed,
}

/// The hosts to assume where no cluster file says better: a host holds as many devices as the mesh's last axis (or
/// `devices_per_host`), and a new mesh starts on a new host. Where hosts have several NICs and an axis is longer than hosts are,
/// it runs over hosts of eight: eight NICs for 64 devices is nobody's machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Assumed {
    pub devices_per_host: Option<u32>,
    /// The host to repeat; its device count is set per mesh.
    pub host: Host,
    pub latency_s: f64,
}

impl Assumed {
    /// An axis longer than this is not the devices of one host.
    pub const MOST_PER_HOST: u32 = 16;
    const USUAL_PER_HOST: u32 = 8;

    /// How many devices a host of this mesh has.
    pub fn per_host(&self, mesh: &Mesh) -> u32 {
        let axis = mesh.last_axis_len();
        let usual = match axis > Self::MOST_PER_HOST && self.host.nics > 1 {
            true => self.host.nics.max(Self::USUAL_PER_HOST),
            false => axis,
        };
        self.devices_per_host.unwrap_or(usual).max(1)
    }
}

impl Default for Assumed {
    fn default() -> Self {
        Self { devices_per_host: None, host: Host::with_devices(1), latency_s: 0.0 }
    }
}

/// Where the hosts come from.
#[derive(Debug, Clone, PartialEq)]
pub enum Hosts {
    Described(Cluster),
    Assumed(Assumed),
}

impl Default for Hosts {
    fn default() -> Self {
        Hosts::Assumed(Assumed::default())
    }
}

/// Tensors, the layouts they move between, and the cluster they move on.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    pub cluster: Cluster,
    pub topology: Topology,
    pub reshards: Vec<Reshard>,
}

impl Problem {
    /// The memory of a device, where it is known.
    pub fn memory_of(&self, rank: Rank) -> Option<u64> {
        self.cluster.hosts[self.topology.host(rank).index()].memory_bytes
    }

    /// One tensor on an assumed cluster.
    pub fn pair(src: Layout, dst: Layout) -> Result<Self, PlanError> {
        Self::new(vec![(String::new(), src, dst)], Hosts::default())
    }

    /// Places every mesh: meshes of one name are one mesh, and a mesh takes the next free ranks unless it lists its
    /// own. A tensor whose destination is a partial sum becomes a tensor for every part of it.
    pub fn new(pairs: Vec<(String, Layout, Layout)>, hosts: Hosts) -> Result<Self, PlanError> {
        if pairs.is_empty() {
            return Err(PlanError::NoTensors);
        }
        for (_, src, dst) in &pairs {
            check_pair(src, dst)?;
        }
        check_bytes(&pairs)?;
        let mut placer = Placer::new(hosts);
        let mut reshards = Vec::with_capacity(pairs.len());
        for (name, src, dst) in pairs {
            let src = placer.place(src)?;
            let dst = placer.place(dst)?;
            if dst.layout.partial().is_none() {
                coverage::check(&src, &dst)?;
                reshards.push(Reshard { name, src, dst });
                continue;
            }
            for (name, src, dst) in shares(&name, &src, &dst)? {
                let (src, dst) = (placer.place(src)?, placer.place(dst)?);
                coverage::check(&src, &dst)?;
                reshards.push(Reshard { name, src, dst });
            }
        }
        let mut cluster = placer.cluster;
        cluster.settle(|topology| received(&reshards, topology));
        let topology = Topology::new(&cluster);
        Ok(Self { cluster, topology, reshards })
    }

    /// The same tensors between the same ranks, on another cluster, which has at least as many devices.
    pub fn move_to(&mut self, mut cluster: Cluster) {
        cluster.settle(|topology| received(&self.reshards, topology));
        self.topology = Topology::new(&cluster);
        self.cluster = cluster;
    }

    /// The names of the meshes that each rank is in.
    pub fn meshes_of_ranks(&self) -> BTreeMap<Rank, BTreeSet<&str>> {
        let mut meshes: BTreeMap<Rank, BTreeSet<&str>> = BTreeMap::new();
        for placed in self.reshards.iter().flat_map(|r| [&r.src, &r.dst]) {
            for rank in &placed.ranks {
                meshes.entry(*rank).or_default().insert(placed.layout.mesh().name());
            }
        }
        meshes
    }
}

/// What the devices of every host have in the end: a mesh's devices alike, which they nearly are.
fn received(reshards: &[Reshard], topology: &Topology) -> Vec<f64> {
    let mut bytes = vec![0.0; topology.num_hosts()];
    for dst in reshards.iter().map(|reshard| &reshard.dst) {
        let of_each = dst.layout.bytes_on_devices() as f64 / dst.ranks.len() as f64;
        dst.ranks.iter().for_each(|rank| bytes[topology.host(*rank).index()] += of_each);
    }
    bytes
}

/// More bytes than this, counted on every device that holds or receives them, is refused: sums of bytes stay far inside
/// `u64`, and times computed from them in `f64` stay true to the byte where it matters.
pub const MAX_BYTES: u64 = 1 << 56;

fn check_bytes(pairs: &[(String, Layout, Layout)]) -> Result<(), PlanError> {
    // Boxes may be a small part of a tensor, whose bytes are added up elsewhere.
    let on_devices = |layout: &Layout| layout.bytes_on_devices().max(layout.bytes().into());
    let bytes = pairs.iter().map(|(_, src, dst)| on_devices(src) + on_devices(dst)).sum::<u128>();
    match bytes > u128::from(MAX_BYTES) {
        true => Err(PlanError::TooLarge { what: "bytes over all devices", limit: MAX_BYTES }),
        false => Ok(()),
    }
}

fn check_pair(src: &Layout, dst: &Layout) -> Result<(), PlanError> {
    let texts = || (src.summary(), dst.summary());
    if src.shape() != dst.shape() {
        let (src, dst) = texts();
        return Err(PlanError::ShapeDiffers { src, dst });
    }
    if src.dtype() != dst.dtype() {
        let (src, dst) = texts();
        return Err(PlanError::DTypeDiffers { src, dst });
    }
    Ok(())
}

/// Hands out ranks, and hosts where nobody described them.
struct Placer {
    cluster: Cluster,
    assumed: Option<Assumed>,
    next_free: u32,
    placed: BTreeMap<String, (Mesh, Vec<Rank>)>,
}

impl Placer {
    fn new(hosts: Hosts) -> Self {
        let (cluster, assumed) = match hosts {
            Hosts::Described(cluster) => (cluster, None),
            Hosts::Assumed(assumed) => {
                let latency_s = assumed.latency_s;
                (Cluster { latency_s, ..Cluster::of_hosts(vec![]) }, Some(assumed))
            }
        };
        Self { cluster, assumed, next_free: 0, placed: BTreeMap::new() }
    }

    fn place(&mut self, layout: Layout) -> Result<Placed, PlanError> {
        let mesh = layout.mesh();
        if let Some((first, ranks)) = self.placed.get(mesh.name()) {
            let same_ranks = mesh.listed_ranks().is_none_or(|listed| listed == ranks);
            if first.axes() != mesh.axes() || !same_ranks {
                return Err(PlanError::MeshRedefined {
                    name: mesh.name().into(),
                    first: format!("{first} on ranks {}", RankList(ranks)),
                    second: mesh.to_string(),
                });
            }
            return Ok(Placed { ranks: ranks.clone(), layout });
        }
        let len = mesh.len() as u32;
        let ranks: Vec<Rank> = match mesh.listed_ranks() {
            Some(ranks) => ranks.to_vec(),
            None => (self.next_free..self.next_free.saturating_add(len)).map(Rank).collect(),
        };
        self.make_room(mesh, &ranks)?;
        let last = ranks.iter().map(|r| r.0).max().expect("a mesh has at least one device");
        self.next_free = self.next_free.max(last + 1);
        self.placed.insert(mesh.name().into(), (mesh.clone(), ranks.clone()));
        Ok(Placed { layout, ranks })
    }

    /// Checks that the cluster has these ranks, or adds the hosts that do.
    fn make_room(&mut self, mesh: &Mesh, ranks: &[Rank]) -> Result<(), PlanError> {
        let last = ranks.iter().map(|r| r.0).max().expect("a mesh has at least one device");
        let devices = self.cluster.num_devices();
        if (last as usize) < devices {
            return Ok(());
        }
        let Some(assumed) = &self.assumed else {
            return Err(PlanError::MeshBeyondCluster {
                mesh: mesh.to_string(),
                name: mesh.name().into(),
                last,
                devices,
            });
        };
        let missing = last + 1 - devices as u32;
        let in_mesh = ranks.iter().filter(|r| r.index() >= devices).count() as u32;
        if in_mesh < missing {
            return Err(PlanError::RankGap { mesh: mesh.to_string(), rank: last, gap: missing - in_mesh });
        }
        let per_host = assumed.per_host(mesh);
        let mut left = missing;
        while left > 0 {
            let devices = left.min(per_host);
            self.cluster.hosts.push(Host { devices, ..assumed.host.clone() });
            left -= devices;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(src: &str, dst: &str) -> Result<Problem, PlanError> {
        Problem::pair(src.parse().unwrap(), dst.parse().unwrap())
    }

    #[test]
    fn a_new_mesh_starts_on_a_new_host() {
        let p = problem("f32[8,6]@A{dp:2,tp:4}(tp,_)", "f32[8,6]@B{tp:3}(_,tp)").unwrap();
        assert_eq!(p.cluster.hosts.iter().map(|h| h.devices).collect::<Vec<_>>(), [4, 4, 3]);
        assert_eq!(p.reshards[0].dst.ranks, [Rank(8), Rank(9), Rank(10)]);
    }

    #[test]
    fn a_long_axis_runs_over_hosts_of_eight_where_hosts_have_several_nics() {
        let devices = |nics: u32, devices_per_host: Option<u32>, axis: u32| -> Vec<u32> {
            let host = Host { nics, ..Host::with_devices(1) };
            let hosts = Hosts::Assumed(Assumed { devices_per_host, host, ..Assumed::default() });
            let layout = |text: String| text.parse().unwrap();
            let src = layout(format!("f32[64]@T{{fsdp:{axis}}}(fsdp)"));
            let pair = (String::new(), src, layout("f32[64]@I{tp:4}(_)".into()));
            let problem = Problem::new(vec![pair], hosts).unwrap();
            problem.cluster.hosts.iter().map(|h| h.devices).collect()
        };
        assert_eq!(devices(8, None, 64), [8, 8, 8, 8, 8, 8, 8, 8, 4]);
        assert_eq!(devices(4, None, 20), [8, 8, 4, 4]);
        assert_eq!(devices(16, None, 32), [16, 16, 4]);
        assert_eq!(devices(1, None, 64), [64, 4], "one NIC says nothing of devices");
        assert_eq!(devices(8, None, 16), [16, 4]);
        assert_eq!(devices(8, Some(32), 64), [32, 32, 4]);
    }

    #[test]
    fn meshes_may_overlap_or_be_the_same() {
        let p = problem("f32[8]@A{tp:4}(tp)", "f32[8]@B{tp:4}=2-5(tp)").unwrap();
        assert_eq!(p.cluster.hosts.iter().map(|h| h.devices).collect::<Vec<_>>(), [4, 2]);
        let p = problem("f32[8]@A{tp:4}(tp)", "f32[8]@A{tp:4}(_)").unwrap();
        assert_eq!(p.cluster.num_devices(), 4);
    }

    #[test]
    fn refuses_what_cannot_be_planned() {
        let fails = |src, dst| problem(src, dst).unwrap_err();
        assert!(matches!(fails("f32[8]@A{tp:4}(tp)", "f16[8]@B{tp:4}(_)"), PlanError::DTypeDiffers { .. }));
        assert!(matches!(fails("f32[8]@A{tp:4}(tp)", "f32[9]@B{tp:4}(_)"), PlanError::ShapeDiffers { .. }));
        assert!(matches!(
            fails("f32[8]@A{tp:4}(tp)", "f32[8]@B{tp:4}(_ | sum tp)"),
            PlanError::PartialDestination { .. }
        ));
        assert!(matches!(fails("f32[8]@A{tp:4}(tp)", "f32[8]@A{tp:2}(tp)"), PlanError::MeshRedefined { .. }));
        assert!(matches!(fails("f32[8]@A{tp:4}(tp)", "f32[8]@B{tp:2}=8-9(tp)"), PlanError::RankGap { .. }));
    }

    #[test]
    fn a_partial_destination_is_a_tensor_for_every_part() {
        let shown = |src, dst| -> Vec<String> {
            let of = |r: &Reshard| format!("{}: {} -> {}", r.name, r.src.layout, r.dst.layout);
            problem(src, dst).unwrap().reshards.iter().map(of).collect()
        };
        assert_eq!(
            shown("f32[8]@A{x:2,d:4}(x | sum d)", "f32[8]@B{d:2}(_ | sum d)"),
            [
                "part 0 of 2: f32[8]@A_d0to1{x:2,d:2}=0-1,4-5(x | sum d) -> f32[8]@B_d0{d:1}=8(_)",
                "part 1 of 2: f32[8]@A_d2to3{x:2,d:2}=2-3,6-7(x | sum d) -> f32[8]@B_d1{d:1}=9(_)"
            ]
        );
        // As many parts: nothing is added up. Two axes on one side, one on the other.
        let same = shown("f32[8]@A{d:2,e:2}(_ | max d+e)", "f32[8]@B{d:4}(_ | max d)");
        assert_eq!(same.len(), 4);
        assert_eq!(same[2], "part 2 of 4: f32[8]@A_d1_e0{d:1,e:1}=2(_) -> f32[8]@B_d2{d:1}=6(_)");
        // One part is the whole.
        assert_eq!(
            shown("f32[8]@A{d:2}(_)", "f32[8]@B{d:1}(_ | sum d)"),
            [": f32[8]@A{d:2}=0-1(_) -> f32[8]@B{d:1}=2(_)"]
        );
        let refused = |src, dst| matches!(problem(src, dst), Err(PlanError::PartialDestination { .. }));
        assert!(refused("f32[8]@A{d:2}(_ | sum d)", "f32[8]@B{d:4}(_ | sum d)"));
        assert!(refused("f32[8]@A{d:4}(_ | sum d)", "f32[8]@B{d:3}(_ | sum d)"));
        assert!(refused("f32[8]@A{d:4}(_ | sum d)", "f32[8]@B{d:2}(_ | max d)"));
    }

    #[test]
    fn refuses_more_bytes_than_it_can_add_up() {
        let of = |shape: u64, dst: &str| {
            problem(&format!("u8[{shape}]@A{{tp:2}}(tp)"), &format!("u8[{shape}]@B{{dp:2,tp:2}}({dst})"))
        };
        let limit = PlanError::TooLarge { what: "bytes over all devices", limit: MAX_BYTES };
        assert_eq!(of(u64::MAX, "tp").unwrap_err(), limit);
        // Four whole copies beside the source are too many, two are not.
        assert_eq!(of(MAX_BYTES / 4, "_").unwrap_err(), limit);
        assert!(of(MAX_BYTES / 4, "tp").is_ok());
        // Boxes that are small but far away in memory, or in a tensor that is too large.
        let far = |boxes: &str| problem(&format!("u8[8]@A{{x:1}}{{0: {boxes}}}"), "u8[8]@B{x:1}{0: [0:1]}");
        assert_eq!(far(&format!("[0:8] at {MAX_BYTES}")).unwrap_err(), limit);
        assert_eq!(far(&format!("[0:8] by {}", MAX_BYTES / 4)).unwrap_err(), limit);
        assert!(far(&format!("[0:8] at {}", MAX_BYTES / 2)).is_ok());
        let huge = format!("u8[{}]@A{{x:1}}{{0: [0:1]}}", u64::MAX);
        assert_eq!(problem(&huge, &huge).unwrap_err(), limit);
    }
}
