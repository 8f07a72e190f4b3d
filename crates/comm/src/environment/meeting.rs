//! Where the ranks of a job meet, and what tells the job from others.
//!
//! ```text
//! address   flag  >  CROSSMESH_MASTER  >  MASTER_ADDR  >  this host, where all ranks are on it  >  Slurm's first node
//! port      flag  >  CROSSMESH_MASTER  >  MASTER_PORT  >  a number made of the job's name, else 29500
//! ```
//!
//! Ports made of a name lie below those that systems hand out for a while, so that jobs which share a node seldom meet
//! at the same one. torchrun's agent may itself listen at `MASTER_PORT`; it says so, and the number is made of that.

use super::{EnvironmentError, Flags, Variables, bad, expand_nodelist};

/// The port where ranks meet, where nothing says another. torchrun's own default.
pub const DEFAULT_PORT: u16 = 29500;
/// Names the meeting place, `HOST:PORT`, whatever launcher there is.
pub const MASTER_VARIABLE: &str = "CROSSMESH_MASTER";

/// Ports that are made of a job's name: from here on, this many.
const FIRST_MADE_PORT: u16 = 20_000;
const MADE_PORTS: u64 = 9_000;

/// Set where torchrun's agent keeps a store of its own at `MASTER_PORT`.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// Says what carries the bytes, whatever launcher there is: `mpi` or `sockets`.
pub const TRANSPORT_VARIABLE: &str = "CROSSMESH_TRANSPORT";

/// What brings the ranks together and carries their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Sockets,
    Mpi,
}

/// MPI where it was built in and a launcher of MPI programs started us; else sockets.
pub fn transport(variables: &Variables, has_mpi: bool) -> Result<Transport, EnvironmentError> {
    match variables.get(TRANSPORT_VARIABLE).map(|text| text.trim()) {
        Some("sockets") => Ok(Transport::Sockets),
        Some("mpi") if has_mpi => Ok(Transport::Mpi),
        Some("mpi") => Err(EnvironmentError::NoMpi),
        Some(other) => Err(bad(TRANSPORT_VARIABLE, other, "`mpi` or `sockets`")),
        None => {
            let by_mpi = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"];
            let ours = !variables.contains_key("RANK") && by_mpi.iter().any(|v| variables.contains_key(*v));
            Ok(if ours && has_mpi { Transport::Mpi } else { Transport::Sockets })
        }
    }
}

/// What every rank of a job knows of it, and other jobs do not share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobName {
    /// Where it comes from, for messages.
    pub variables: Vec<&'static str>,
    pub text: String,
    /// Whether a stranger cannot guess it.
    pub secret: bool,
}

/// The variables that name a job, by launcher.
const NAMES: [(&str, &[&str]); 4] = [
    ("torchrun", &["TORCHELASTIC_RUN_ID", "MASTER_PORT"]),
    ("Slurm", &["SLURM_JOB_ID", "SLURM_STEP_ID"]),
    ("OpenMPI", &[DRAWN_BY_LOT, "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"]),
    ("PMI", &["PMI_JOBID", "PMIX_NAMESPACE"]),
];

/// mpirun's key for the networks of a job.
const DRAWN_BY_LOT: &str = "OMPI_MCA_orte_precondition_transports";

/// The job's name, if its launcher gave it one.
pub fn job_name(launcher: &str, variables: &Variables) -> Option<JobName> {
    let (_, names) = NAMES.iter().find(|(name, _)| *name == launcher)?;
    let known: Vec<(&'static str, &String)> =
        names.iter().filter_map(|name| Some((*name, variables.get(*name)?))).collect();
    if known.is_empty() {
        return None;
    }
    let text = known.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let variables: Vec<&str> = known.into_iter().map(|(name, _)| name).collect();
    let secret = variables.contains(&DRAWN_BY_LOT);
    Some(JobName { variables, text, secret })
}

/// Whether Slurm says that there is but one node.
pub(super) fn one_node(variables: &Variables) -> bool {
    let count = ["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"];
    count.iter().find_map(|name| variables.get(*name)).is_some_and(|nodes| nodes.trim() == "1")
}

/// Host and port.
pub(super) fn master(
    flags: &Flags,
    variables: &Variables,
    launcher: &'static str,
    all_here: bool,
) -> Result<(String, u16), EnvironmentError> {
    if let Some(text) = &flags.master {
        return host_and_port("--master", text);
    }
    if let Some(text) = variables.get(MASTER_VARIABLE) {
        return host_and_port(MASTER_VARIABLE, text);
    }
    let port = port(variables, launcher)?;
    if let Some(addr) = variables.get("MASTER_ADDR").filter(|addr| !addr.trim().is_empty()) {
        return Ok((bare(addr).into(), port));
    }
    if all_here {
        return Ok(("127.0.0.1".into(), port));
    }
    for variable in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        if let Some(list) = variables.get(variable) {
            let first = expand_nodelist(list)?.into_iter().next();
            return Ok((first.ok_or(EnvironmentError::NoMaster { launcher })?, port));
        }
    }
    Err(EnvironmentError::NoMaster { launcher })
}

fn host_and_port(variable: &str, text: &str) -> Result<(String, u16), EnvironmentError> {
    let parsed = text.trim().rsplit_once(':').and_then(|(addr, port)| Some((addr, port_number(port)?)));
    let (addr, port) = parsed.ok_or_else(|| bad(variable, text, "HOST:PORT, such as 10.0.0.1:29500"))?;
    Ok((bare(addr).into(), port))
}

/// An address without the brackets that IPv6 wears beside a port.
fn bare(addr: &str) -> &str {
    addr.trim().trim_matches(['[', ']'])
}

/// Port 0 is any port: nobody could meet there.
fn port_number(text: &str) -> Option<u16> {
    text.trim().parse().ok().filter(|port| *port != 0)
}

fn port(variables: &Variables, launcher: &str) -> Result<u16, EnvironmentError> {
    let given = match variables.get("MASTER_PORT") {
        None => None,
        Some(text) => {
            Some(port_number(text).ok_or_else(|| bad("MASTER_PORT", text, "a port from 1 to 65535"))?)
        }
    };
    let occupied = launcher == "torchrun" && variables.get(AGENT_STORE).is_some_and(|v| v == "True");
    match (given, job_name(launcher, variables)) {
        (Some(port), _) if !occupied => Ok(port),
        (_, Some(name)) => Ok(made_port(&name)),
        (given, None) => Ok(given.unwrap_or(DEFAULT_PORT)),
    }
}

fn made_port(name: &JobName) -> u16 {
    let hash = blake3::hash(name.text.as_bytes());
    let word = u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"));
    FIRST_MADE_PORT + (word % MADE_PORTS) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    fn meet(launcher: &'static str, all_here: bool, pairs: &[(&str, &str)]) -> (String, u16) {
        master(&Flags::default(), &vars(pairs), launcher, all_here).unwrap()
    }

    #[test]
    fn our_variable_goes_before_the_launchers() {
        let pairs = [("MASTER_ADDR", "a"), ("MASTER_PORT", "1"), (MASTER_VARIABLE, "[::1]:7")];
        assert_eq!(meet("torchrun", true, &pairs), ("::1".into(), 7));
        let why = master(&Flags::default(), &vars(&[(MASTER_VARIABLE, "x")]), "PMI", true).unwrap_err();
        assert_eq!(why.to_string(), "CROSSMESH_MASTER=x is not HOST:PORT, such as 10.0.0.1:29500");
    }

    #[test]
    fn addresses_and_ports_are_what_ranks_can_meet_at() {
        assert_eq!(
            meet("torchrun", true, &[("MASTER_ADDR", "[::1]"), ("MASTER_PORT", "7")]),
            ("::1".into(), 7)
        );
        for (pair, variable) in
            [(("MASTER_PORT", "0"), "MASTER_PORT=0"), ((MASTER_VARIABLE, "a:0"), "CROSSMESH_MASTER=a:0")]
        {
            let why = master(&Flags::default(), &vars(&[("MASTER_ADDR", "a"), pair]), "torchrun", true)
                .unwrap_err();
            assert!(why.to_string().starts_with(variable), "{why}");
        }
    }

    #[test]
    fn jobs_on_a_node_meet_at_ports_of_their_own() {
        let (addr, one) = meet("Slurm", true, &[("SLURM_JOB_ID", "71"), ("SLURM_STEP_ID", "0")]);
        let (_, other) = meet("Slurm", true, &[("SLURM_JOB_ID", "71"), ("SLURM_STEP_ID", "1")]);
        assert_eq!(addr, "127.0.0.1");
        assert!(one != other && (20_000..29_000).contains(&one) && (20_000..29_000).contains(&other));
        assert_eq!(meet("OpenMPI", true, &[]), ("127.0.0.1".into(), DEFAULT_PORT));
    }

    #[test]
    fn torchruns_own_port_is_left_to_its_agent() {
        let plain = [("MASTER_ADDR", "a"), ("MASTER_PORT", "4000")];
        assert_eq!(meet("torchrun", false, &plain), ("a".into(), 4000));
        let (addr, port) = meet("torchrun", false, &[&plain[..], &[(AGENT_STORE, "True")]].concat());
        assert!(addr == "a" && (20_000..29_000).contains(&port), "{addr}:{port}");
    }

    #[test]
    fn a_step_of_slurm_meets_on_its_own_first_node() {
        let pairs = [("SLURM_JOB_NODELIST", "n[1-4]"), ("SLURM_STEP_NODELIST", "n[3-4]")];
        assert_eq!(meet("Slurm", false, &pairs).0, "n3");
    }

    #[test]
    fn mpi_carries_the_bytes_where_it_started_us() {
        let chosen = |pairs: &[(&str, &str)], has_mpi| transport(&vars(pairs), has_mpi);
        let ompi = ("OMPI_COMM_WORLD_RANK", "0");
        assert_eq!(chosen(&[ompi], true), Ok(Transport::Mpi));
        assert_eq!(chosen(&[ompi], false), Ok(Transport::Sockets));
        assert_eq!(chosen(&[ompi, ("RANK", "0")], true), Ok(Transport::Sockets));
        assert_eq!(chosen(&[("SLURM_PROCID", "0")], true), Ok(Transport::Sockets));
        assert_eq!(chosen(&[("SLURM_PROCID", "0"), ("PMIX_RANK", "0")], true), Ok(Transport::Mpi));
        assert_eq!(chosen(&[ompi, (TRANSPORT_VARIABLE, "sockets")], true), Ok(Transport::Sockets));
        assert_eq!(chosen(&[ompi, (TRANSPORT_VARIABLE, "mpi")], false), Err(EnvironmentError::NoMpi));
        let why = chosen(&[(TRANSPORT_VARIABLE, "pigeons")], true).unwrap_err().to_string();
        assert_eq!(why, "CROSSMESH_TRANSPORT=pigeons is not `mpi` or `sockets`");
    }

    #[test]
    fn nobody_knows_where_mpirun_put_rank_0() {
        let why = master(&Flags::default(), &Variables::new(), "OpenMPI", false).unwrap_err().to_string();
        assert!(why.starts_with("no one says where the ranks meet: OpenMPI does not"), "{why}");
    }
}
