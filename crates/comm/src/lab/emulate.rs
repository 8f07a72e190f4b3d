//! A cluster on one machine: every host is a network namespace with a shaped NIC, joined by a switch.
//!
//! ```text
//! xm4711.0-h0            xm4711.0-switch             xm4711.0-h1
//!  nic 10.77.0.1  =====  p0   bridge   p1  =====  nic 10.77.0.2
//!  tbf: out rate         tbf: in rate
//! ```
//!
//! A NIC is full duplex: what leaves is shaped at the host, what comes in at the switch. The bucket is small, so that
//! short transfers are shaped too, and packets reach it one by one, or as many together as pass within 100 µs. Names carry the process's number: jobs run side
//! by side, and what a killed one left behind is recognised and removed by the next. No address leaves the machine.
//! Hosts use Linux's usual congestion control, whatever this machine uses.

use std::fmt;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::launch::janitor::{Keeping, Kept, keep};

/// Hosts that one address block and a patient person have room for.
pub const MAX_HOSTS: usize = 250;
const PREFIX: &str = "xm";
const NAMESPACES: &str = "/run/netns";
const NETWORK: &str = "10.77.0.0/24";
const MTU: u32 = 9000;
/// What a host may hand over at once, in time, and in bytes at most. A wire carries packet after packet; but a fast NIC is
/// given many of them in one piece and cuts it up itself, and where every packet is a piece, the processors that play the
/// network are busier than those that use it.
const PIECE_S: f64 = 100e-6;
const MAX_PIECE: f64 = 65536.0;
/// Of the shapers: small, so that a short transfer is not over before the shaping begins; but two pieces have to fit.
const MIN_BURST: u32 = 64 << 10;
/// How much may queue at a NIC before packets are dropped, in time.
const QUEUE: &str = "20ms";
/// For both ends of a cable to notice that it is plugged in.
const PLUGGED: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// What a host's NIC carries, each way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NicRate {
    pub out_bytes_per_s: f64,
    pub in_bytes_per_s: f64,
}

/// Why there is no emulated cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmulateError {
    #[error(
        "emulating hosts needs root: network namespaces and traffic shaping\nhint: run as root (sudo), or leave --emulate out to use loopback"
    )]
    NeedsRoot,
    #[error("emulating hosts needs `{tool}`, which is not installed\nhint: install iproute2")]
    MissingTool { tool: &'static str },
    #[error(
        "emulating hosts failed at `{command}`: {why}\nhint: the kernel needs network namespaces, veth, bridge and the tbf queueing discipline"
    )]
    Failed { command: String, why: String },
    #[error("{0} hosts cannot be emulated\nhint: from 1 to {MAX_HOSTS}")]
    HostCount(usize),
    #[error("a NIC of {0} B/s cannot be emulated\nhint: from 8 kbit/s to 1 Tbit/s")]
    Rate(f64),
}

/// Namespaces that exist as long as this value does.
#[derive(Debug)]
pub struct Emulation {
    name: String,
    hosts: usize,
    /// What hosts hand over at once, in bytes.
    piece: u32,
    /// Should we be killed.
    _kept: Vec<Keeping>,
}

impl Emulation {
    /// Brings up a host for each rate.
    pub fn up(rates: &[NicRate]) -> Result<Self, EmulateError> {
        if rates.is_empty() || rates.len() > MAX_HOSTS {
            return Err(EmulateError::HostCount(rates.len()));
        }
        if !rustix::process::geteuid().is_root() {
            return Err(EmulateError::NeedsRoot);
        }
        remove_stale();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("{PREFIX}{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // From here on, dropping it removes whatever is there already.
        let mut emulation = Self { name, hosts: rates.len(), piece: piece_bytes(rates), _kept: vec![] };
        emulation._kept = emulation.namespaces().map(|name| keep(Kept::Namespace(name))).collect();
        emulation.add_namespaces()?;
        emulation.add_switch()?;
        for (host, rate) in rates.iter().enumerate() {
            emulation.plug_in(host)?;
            emulation.set_rate(host, *rate)?;
        }
        Ok(emulation)
    }

    /// The namespace of a host, as `ip netns` knows it.
    pub fn namespace(&self, host: usize) -> String {
        format!("{}-h{host}", self.name)
    }

    /// A host's address, the same in every emulation.
    pub fn address(host: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, host as u8 + 1)
    }

    /// Gives a host another NIC.
    pub fn set_rate(&self, host: usize, rate: NicRate) -> Result<(), EmulateError> {
        self.shape(&self.namespace(host), "nic", rate.out_bytes_per_s)?;
        self.shape(&self.switch(), &format!("p{host}"), rate.in_bytes_per_s)
    }

    /// Pulls a host's cable.
    pub fn cut(&self, host: usize) -> Result<(), EmulateError> {
        tool("ip", &["-n", &self.switch(), "link", "set", &format!("p{host}"), "down"], "").map(drop)
    }

    /// Plugs it in again. Both ends have noticed when this returns, which may take the kernel a second.
    pub fn heal(&self, host: usize) -> Result<(), EmulateError> {
        let port = format!("p{host}");
        tool("ip", &["-n", &self.switch(), "link", "set", &port, "up"], "")?;
        await_up(&self.switch(), &port)?;
        await_up(&self.namespace(host), "nic")
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn namespaces(&self) -> impl Iterator<Item = String> {
        (0..self.hosts).map(|host| self.namespace(host)).chain([self.switch()])
    }

    fn add_namespaces(&self) -> Result<(), EmulateError> {
        tool("ip", &["-batch", "-"], &lines(self.namespaces().map(|name| format!("netns add {name}"))))
            .map(drop)
    }

    fn add_switch(&self) -> Result<(), EmulateError> {
        let commands = ["link set lo up", "link add name bridge0 type bridge", "link set bridge0 up"];
        tool("ip", &["-n", &self.switch(), "-batch", "-"], &lines(commands)).map(drop)
    }

    /// A cable between a host and the switch.
    fn plug_in(&self, host: usize) -> Result<(), EmulateError> {
        let (switch, address) = (self.switch(), Self::address(host));
        let at_host = [
            format!("link add name nic type veth peer name p{host} netns {switch}"),
            format!("link set nic mtu {MTU}"),
            format!("link set nic gso_max_size {} gso_max_segs {}", self.piece, self.piece.div_ceil(MTU)),
            format!("addr add {address}/24 dev nic"),
            "link set nic up".into(),
            format!("route replace {NETWORK} dev nic proto kernel scope link src {address} congctl cubic"),
            "link set lo up".into(),
        ];
        tool("ip", &["-n", &self.namespace(host), "-batch", "-"], &lines(at_host))?;
        let at_switch =
            [format!("link set p{host} mtu {MTU}"), format!("link set p{host} master bridge0 up")];
        tool("ip", &["-n", &switch, "-batch", "-"], &lines(at_switch)).map(drop)
    }

    fn shape(&self, namespace: &str, device: &str, bytes_per_s: f64) -> Result<(), EmulateError> {
        let bits = bytes_per_s * 8.0;
        if !(8e3..=1e12).contains(&bits) {
            return Err(EmulateError::Rate(bytes_per_s));
        }
        let rate = format!("{}bit", bits.round() as u64);
        let burst = MIN_BURST.max(2 * self.piece).to_string();
        let shaper = ["tbf", "rate", &rate, "burst", &burst, "latency", QUEUE];
        let args = [&["-n", namespace, "qdisc", "replace", "dev", device, "root"][..], &shaper].concat();
        tool("tc", &args, "").map(drop)
    }
}

/// What the slowest of some NICs carries in [`PIECE_S`], and at least a packet.
fn piece_bytes(rates: &[NicRate]) -> u32 {
    let slowest = rates.iter().map(|r| r.out_bytes_per_s.min(r.in_bytes_per_s)).fold(f64::INFINITY, f64::min);
    let packets = ((slowest * PIECE_S).min(MAX_PIECE) / f64::from(MTU)).floor().max(1.0);
    packets as u32 * MTU
}

impl fmt::Display for Emulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        remove(self.namespaces());
    }
}

/// Removes the namespaces of processes that are no more.
pub fn remove_stale() {
    let names = std::fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    remove(names.filter(|name| owner(name).is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())));
}

/// The process that made a namespace of ours: 4711 of `xm4711.0-h0`.
fn owner(name: &str) -> Option<u32> {
    let (pid, rest) = name.strip_prefix(PREFIX)?.split_once('.')?;
    let (number, _) = rest.split_once('-')?;
    number.parse::<u32>().ok().and(pid.parse().ok())
}

/// Removes namespaces as `ip netns del` does, but all at once: each waits until no processor looks at it any more, which takes a while
/// where they are busy.
fn remove(names: impl Iterator<Item = String>) {
    let paths: Vec<_> = names.map(|name| Path::new(NAMESPACES).join(name)).filter(|p| p.exists()).collect();
    let remove = |path: &Path| {
        // Another process may have removed it meanwhile; nobody can do more.
        let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
        let _ = std::fs::remove_file(path);
    };
    std::thread::scope(|scope| {
        for path in &paths {
            let started = std::thread::Builder::new().spawn_scoped(scope, || remove(path));
            if started.is_err() {
                remove(path);
            }
        }
    });
}

/// Waits until a device says that it is up.
fn await_up(namespace: &str, device: &str) -> Result<(), EmulateError> {
    let args = ["-n", namespace, "-oneline", "link", "show", "dev", device];
    let deadline = Deadline::after(PLUGGED);
    loop {
        let said = tool("ip", &args, "")?;
        if said.contains(" state UP ") {
            return Ok(());
        }
        if deadline.passed() {
            let why = format!("it is not up after {} s: {}", PLUGGED.as_secs(), said.trim());
            return Err(EmulateError::Failed { command: format!("ip {}", args.join(" ")), why });
        }
        std::thread::sleep(LOOK);
    }
}

fn lines(commands: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    commands.into_iter().map(|command| format!("{}\n", command.as_ref())).collect()
}

/// Runs one of iproute2's tools, with `input` on its stdin; what it says on its stdout.
fn tool(tool: &'static str, args: &[&str], input: &str) -> Result<String, EmulateError> {
    let shown =
        format!("{tool} {}{}{}", args.join(" "), if input.is_empty() { "" } else { " <<< " }, input.trim());
    let failed = |why: String| EmulateError::Failed { command: shown.replace('\n', "; "), why };
    let mut child = Command::new(tool)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => EmulateError::MissingTool { tool },
            _ => failed(e.to_string()),
        })?;
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")));
    }
    written.map_err(|e| failed(e.to_string()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_from_names() {
        assert_eq!(owner("xm4711.0-h3"), Some(4711));
        assert_eq!(owner("xm1.12-switch"), Some(1));
        for other in ["xm-h0", "xm-switch", "xm.0-h0", "xmas.1-h0", "docker0", "xm5-h0", "xm5.x-h0"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }

    #[test]
    fn fast_nics_are_given_packets_in_pieces() {
        let piece = |bits: &[f64]| {
            let rate = |b: &f64| NicRate { out_bytes_per_s: b / 8.0, in_bytes_per_s: b / 8.0 };
            piece_bytes(&bits.iter().map(rate).collect::<Vec<_>>())
        };
        assert_eq!(piece(&[400e6]), MTU, "one by one");
        assert_eq!(piece(&[1e9]), MTU);
        assert_eq!(piece(&[2e9]), 2 * MTU);
        assert_eq!(piece(&[5e9]), 6 * MTU);
        assert_eq!(piece(&[100e9]), 7 * MTU);
        assert_eq!(piece(&[100e9, 400e6]), MTU, "the slowest decides");
    }

    #[test]
    fn senseless_clusters_are_refused() {
        assert!(matches!(Emulation::up(&[]), Err(EmulateError::HostCount(0))));
        let rate = NicRate { out_bytes_per_s: 1e6, in_bytes_per_s: 1e6 };
        assert!(matches!(Emulation::up(&[rate; MAX_HOSTS + 1]), Err(EmulateError::HostCount(251))));
    }
}
