//! Who am I? The rank, the world and the meeting place, from flags or from what a launcher left in the environment.
//!
//! ```text
//! flags  >  crossmesh launch, torchrun  >  Slurm  >  OpenMPI  >  PMI
//! ```
//!
//! The first launcher in this order whose rank variable is there is believed, with all its variables: mpirun inside a
//! Slurm allocation also sees `SLURM_PROCID`, which is why torchrun's names, which our own launcher uses too, come
//! first. Where the ranks meet is in [`meeting`]. It is a pure function of the variables, so tests need no processes.

use std::collections::BTreeMap;
use std::time::Duration;

use crossmesh_core::id::Rank;

use crate::rendezvous::Late;

mod meeting;
mod nodelist;

pub use meeting::{
    DEFAULT_PORT, JobName, MASTER_VARIABLE, TRANSPORT_VARIABLE, Transport, job_name, transport,
};
pub use nodelist::expand_nodelist;

/// More ranks than this are a typing mistake.
pub const MAX_WORLD: u32 = 1 << 20;

/// Variables by name.
pub type Variables = BTreeMap<String, String>;

/// What the command line says; it goes before every variable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    pub rank: Option<u32>,
    pub world: Option<u32>,
    /// `HOST:PORT` of the rendezvous.
    pub master: Option<String>,
}

/// A process's place in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub rank: Rank,
    pub world: u32,
    /// Among the ranks of its host.
    pub local_rank: u32,
    /// Ranks of its host, where the launcher says.
    pub local_world: Option<u32>,
    /// Host name or address of the rendezvous, and its port.
    pub master_addr: String,
    pub master_port: u16,
    /// The launcher that was believed, for messages.
    pub launcher: &'static str,
}

/// Why nobody knows who we are.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    #[error(
        "no launcher told this process its rank\nhint: start it with `crossmesh launch`, torchrun, srun or mpirun, or set RANK and WORLD_SIZE"
    )]
    NoRank,
    #[error("{variable} is not set, though {launcher} set the rank")]
    Missing { variable: &'static str, launcher: &'static str },
    #[error("{variable}={value} is not {what}")]
    Bad { variable: String, value: String, what: &'static str },
    #[error("{variable}={rank} is not below the world of {world}")]
    RankOutside { variable: &'static str, rank: u32, world: u32 },
    #[error(
        "no one says where the ranks meet: {launcher} does not, and MASTER_ADDR is not set\nhint: set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there"
    )]
    NoMaster { launcher: &'static str },
    #[error(
        "CROSSMESH_TRANSPORT asks for MPI, which this program was built without\nhint: cargo build --features mpi"
    )]
    NoMpi,
    #[error("{list} is not a list of nodes: {why}\nhint: it should read like n[1-3,7],login")]
    Nodelist { list: String, why: &'static str },
}

/// The variables of one launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world: "LOCAL_WORLD_SIZE",
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_world: "SLURM_NTASKS_PER_NODE",
    },
    Launcher {
        name: "OpenMPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Launcher {
        name: "PMI",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
    },
];

fn who_told(variables: &Variables) -> Option<&'static Launcher> {
    LAUNCHERS.iter().find(|launcher| variables.contains_key(launcher.rank))
}

/// The launcher that made this process a rank, if one did, and how many ranks it says there are.
pub fn launcher(variables: &Variables) -> Option<(&'static str, Option<u32>)> {
    let launcher = who_told(variables)?;
    Some((launcher.name_in(variables), number(launcher.world, variables).ok().flatten()))
}

impl Launcher {
    /// Our own has torchrun's variables, and one more.
    fn name_in(&self, variables: &Variables) -> &'static str {
        let ours = self.name == "torchrun" && variables.contains_key(LAUNCHER_VARIABLE);
        if ours { "crossmesh launch" } else { self.name }
    }
}

/// The place that flags and variables give this process.
pub fn place(flags: &Flags, variables: &Variables) -> Result<Place, EnvironmentError> {
    let told = who_told(variables);
    // With both flags no launcher is needed; torchrun's names then fill in the rest.
    let launcher = match (told, flags.rank, flags.world) {
        (Some(launcher), ..) => launcher,
        (None, Some(_), Some(_)) => &LAUNCHERS[0],
        (None, ..) => return Err(EnvironmentError::NoRank),
    };
    let rank = required(flags.rank, launcher.rank, launcher, variables)?;
    let world = required(flags.world, launcher.world, launcher, variables)?;
    if world == 0 || world > MAX_WORLD {
        return Err(bad(launcher.world, world, "a number of ranks from 1 to 1048576"));
    }
    if rank >= world {
        return Err(EnvironmentError::RankOutside { variable: launcher.rank, rank, world });
    }
    let local_world = number(launcher.local_world, variables)?;
    let local_rank =
        number(launcher.local_rank, variables)?.unwrap_or(rank % local_world.unwrap_or(world).max(1));
    let all_here = local_world == Some(world) || (launcher.name == "Slurm" && meeting::one_node(variables));
    let (master_addr, master_port) = meeting::master(flags, variables, launcher.name, all_here)?;
    let launcher = if told.is_some() { launcher.name_in(variables) } else { "flags" };
    Ok(Place { rank: Rank(rank), world, local_rank, local_world, master_addr, master_port, launcher })
}

fn required(
    flag: Option<u32>,
    variable: &'static str,
    launcher: &Launcher,
    variables: &Variables,
) -> Result<u32, EnvironmentError> {
    match flag {
        Some(value) => Ok(value),
        None => number(variable, variables)?
            .ok_or(EnvironmentError::Missing { variable, launcher: launcher.name }),
    }
}

fn number(variable: &'static str, variables: &Variables) -> Result<Option<u32>, EnvironmentError> {
    let Some(text) = variables.get(variable) else { return Ok(None) };
    // Slurm writes `4(x2)` for "4 on each of 2 nodes".
    let digits =
        if variable == "SLURM_NTASKS_PER_NODE" { text.split('(').next().unwrap_or("") } else { text };
    match digits.trim().parse() {
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(bad(variable, text, "a whole number")),
    }
}

fn bad(variable: &str, value: impl ToString, what: &'static str) -> EnvironmentError {
    EnvironmentError::Bad { variable: variable.into(), value: value.to_string(), what }
}

impl Place {
    /// Whether the ranks meet where no other host can come.
    pub fn is_on_loopback(&self) -> bool {
        let ip: Result<std::net::IpAddr, _> = self.master_addr.parse();
        ip.map_or(self.master_addr == "localhost", |ip| ip.is_loopback())
    }

    /// The variables that say this again, in torchrun's names.
    pub fn to_variables(&self) -> Variables {
        let mut variables = Variables::new();
        let mut set = |name: &str, value: String| drop(variables.insert(name.into(), value));
        set("RANK", self.rank.0.to_string());
        set("WORLD_SIZE", self.world.to_string());
        set("LOCAL_RANK", self.local_rank.to_string());
        if let Some(local_world) = self.local_world {
            set("LOCAL_WORLD_SIZE", local_world.to_string());
        }
        set("MASTER_ADDR", self.master_addr.clone());
        set("MASTER_PORT", self.master_port.to_string());
        variables
    }
}

/// The name of the variable that says which host a process is on, where that is not the machine's own name: emulated
/// hosts share one.
pub const HOST_VARIABLE: &str = "CROSSMESH_HOST";

/// The name of the variable by which our own launcher is told from torchrun, whose other variables it sets.
pub const LAUNCHER_VARIABLE: &str = "CROSSMESH_LAUNCHER";

/// The name of the variable with the moment at which a launcher began to start a job: milliseconds since 1970.
pub const STARTED_VARIABLE: &str = "CROSSMESH_STARTED_MS";

/// How long after its job this process was started, and has come so far, where the launcher says. Clocks of hosts differ
/// a little, and who is early is on time.
pub fn late(variables: &Variables) -> Option<Late> {
    let started_ms: u64 = variables.get(STARTED_VARIABLE)?.trim().parse().ok()?;
    let came = Duration::from_millis(now_ms().saturating_sub(started_ms));
    let age = Duration::from_millis(process_age_ms().unwrap_or(0));
    let idle = age.saturating_sub(busy().unwrap_or(age));
    Some(Late { started: came.saturating_sub(age), came, idle })
}

/// How long this thread has run, or waited for a processor.
fn busy() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let mut numbers = text.split_whitespace().map(|n| n.parse::<u64>().ok());
    Some(Duration::from_nanos(numbers.next()?? + numbers.next()??))
}

/// How long this process has been running: the 22nd number of its `stat`, behind its name, counts in hundredths of a
/// second from the machine's start.
fn process_age_ms() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let started: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now_ms = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
    Some(now_ms.saturating_sub(started * 10))
}

/// What a launcher puts into [`STARTED_VARIABLE`].
pub fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Ranks with the same answer share memory.
pub fn host_name(variables: &Variables) -> String {
    match variables.get(HOST_VARIABLE) {
        Some(name) if !name.is_empty() => name.clone(),
        _ => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    }
}

/// This process's variables; those that are not text cannot be ours.
pub fn variables() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    fn placed(pairs: &[(&str, &str)]) -> Result<Place, String> {
        place(&Flags::default(), &vars(pairs)).map_err(|e| e.to_string())
    }

    fn why(pairs: &[(&str, &str)]) -> String {
        placed(pairs).unwrap_err()
    }

    #[test]
    fn torchrun_is_read() {
        let env = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "1234"),
        ];
        let p = placed(&env).unwrap();
        assert_eq!((p.rank, p.world, p.local_rank, p.local_world), (Rank(5), 8, 1, Some(4)));
        assert_eq!((p.master_addr.as_str(), p.master_port, p.launcher), ("node0", 1234, "torchrun"));
    }

    #[test]
    fn a_place_survives_the_environment() {
        let env = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")];
        let flags = Flags { master: Some("node0:1234".into()), ..Flags::default() };
        let p = place(&flags, &vars(&env)).unwrap();
        assert_eq!(place(&Flags::default(), &p.to_variables()).unwrap(), p);
    }

    #[test]
    fn slurm_meets_on_its_first_node() {
        let env = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_NTASKS_PER_NODE", "2(x2)"),
            ("SLURM_JOB_NODELIST", "gpu[07-08],x1"),
        ];
        let p = placed(&env).unwrap();
        assert_eq!((p.rank, p.world, p.local_rank, p.local_world), (Rank(3), 4, 1, Some(2)));
        assert_eq!((p.master_addr.as_str(), p.master_port, p.launcher), ("gpu07", DEFAULT_PORT, "Slurm"));
    }

    #[test]
    fn openmpi_and_pmi_are_read() {
        let env = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("MASTER_ADDR", "a"),
        ];
        let p = placed(&env).unwrap();
        assert_eq!((p.rank, p.local_rank, p.launcher), (Rank(1), 0, "OpenMPI"));
        let p = placed(&[("PMI_RANK", "6"), ("PMI_SIZE", "7"), ("MASTER_ADDR", "a")]).unwrap();
        assert_eq!((p.rank, p.world, p.local_rank, p.launcher), (Rank(6), 7, 6, "PMI"));
    }

    #[test]
    fn flags_go_first_and_torchrun_before_slurm() {
        let env = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("MASTER_ADDR", "a"),
        ];
        assert_eq!(placed(&env).unwrap().rank, Rank(1));
        let flags = Flags { rank: Some(3), world: Some(4), master: Some("[::1]:7".into()) };
        let p = place(&flags, &vars(&env)).unwrap();
        assert_eq!((p.rank, p.world, p.master_addr.as_str(), p.master_port), (Rank(3), 4, "::1", 7));
        assert_eq!(place(&flags, &vars(&[])).unwrap().launcher, "flags");
    }

    #[test]
    fn errors_name_the_variable_and_its_value() {
        assert!(why(&[]).starts_with("no launcher told"));
        assert_eq!(why(&[("RANK", "0")]), "WORLD_SIZE is not set, though torchrun set the rank");
        assert_eq!(why(&[("RANK", "x"), ("WORLD_SIZE", "2")]), "RANK=x is not a whole number");
        assert_eq!(why(&[("RANK", "-1"), ("WORLD_SIZE", "2")]), "RANK=-1 is not a whole number");
        assert_eq!(why(&[("RANK", "2"), ("WORLD_SIZE", "2")]), "RANK=2 is not below the world of 2");
        assert!(why(&[("RANK", "0"), ("WORLD_SIZE", "0")]).starts_with("WORLD_SIZE=0 is not a number"));
        assert!(why(&[("RANK", "0"), ("WORLD_SIZE", "2")]).contains("MASTER_ADDR is not set"));
        let port = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")];
        assert_eq!(why(&port), "MASTER_PORT=70000 is not a port from 1 to 65535");
        let flags = Flags { rank: Some(0), world: Some(1), master: Some("nowhere".into()) };
        assert!(place(&flags, &vars(&[])).unwrap_err().to_string().starts_with("--master=nowhere is not"));
    }
}
