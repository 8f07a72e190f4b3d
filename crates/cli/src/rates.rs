//! NIC rates on the command line: one for all hosts, and others for some.
//!
//! ```text
//! 400Mbit                      every host
//! 400Mbit,h1=200Mbit           every host but h1
//! h1=200Mbit,h3=1Gbit          those two; the others keep what they have
//! ```

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::HostId;
use crossmesh_core::units::parse_rate;

const HINT: &str = "such as 400Mbit, or 400Mbit,h1=200Mbit";

/// See the module. In bytes per second.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NicRates {
    pub every: Option<f64>,
    hosts: BTreeMap<HostId, f64>,
}

impl NicRates {
    pub fn parse(text: &str) -> Result<Self> {
        let mut rates = Self::default();
        for (place, word) in text.split(',').enumerate() {
            match word.split_once('=') {
                None if place == 0 => rates.every = Some(parse_rate(word)?),
                None => bail!("`{word}` names no host\nhint: {HINT}"),
                Some((host, rate)) => {
                    let host = parse_host(host)?;
                    if rates.hosts.insert(host, parse_rate(rate)?).is_some() {
                        bail!("{host} is given two rates");
                    }
                }
            }
        }
        Ok(rates)
    }

    /// Gives the hosts of a cluster their NICs.
    pub fn apply(&self, cluster: &mut Cluster) -> Result<()> {
        if let Some(rate) = self.every {
            cluster.hosts.iter_mut().for_each(|host| set(host, rate));
        }
        let last = cluster.hosts.len().saturating_sub(1);
        for (id, rate) in &self.hosts {
            let host = cluster.hosts.get_mut(id.index());
            let host =
                host.with_context(|| format!("there is no host {id}\nhint: hosts are h0 to h{last}"))?;
            set(host, *rate);
        }
        Ok(())
    }

    /// Whether some host differs from the others.
    pub fn differ(&self) -> bool {
        !self.hosts.is_empty()
    }
}

fn set(host: &mut Host, rate: f64) {
    (host.nic_out_bytes_per_s, host.nic_in_bytes_per_s) = (rate, rate);
}

fn parse_host(text: &str) -> Result<HostId> {
    let number = text.strip_prefix('h').and_then(|digits| digits.parse().ok());
    number
        .map(HostId)
        .with_context(|| format!("`{text}` is no host\nhint: hosts are h0, h1 and so on; {HINT}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_may_differ() {
        let mut cluster = Cluster::of_hosts(vec![Host::with_devices(2); 3]);
        NicRates::parse("400Mbit,h1=200Mbit").unwrap().apply(&mut cluster).unwrap();
        let rates: Vec<f64> = cluster.hosts.iter().map(|h| h.nic_in_bytes_per_s).collect();
        assert_eq!(rates, [50e6, 25e6, 50e6]);
        NicRates::parse("h2=8bit").unwrap().apply(&mut cluster).unwrap();
        let rates: Vec<f64> = cluster.hosts.iter().map(|h| h.nic_out_bytes_per_s).collect();
        assert_eq!(rates, [50e6, 25e6, 1.0]);
    }

    #[test]
    fn nonsense_is_pointed_at() {
        let message = |text: &str| format!("{:#}", NicRates::parse(text).unwrap_err());
        assert!(message("400Mbit,200Mbit").contains("`200Mbit` names no host"));
        assert!(message("400Mbit,x1=200Mbit").contains("`x1` is no host"));
        assert!(message("400Mbit,h-1=200Mbit").contains("`h-1` is no host"));
        assert!(message("h1=1bit,h1=2bit").contains("h1 is given two rates"));
        assert!(message("h1=").contains("rate"));
        assert!(message("").contains("rate"));
        let mut cluster = Cluster::of_hosts(vec![Host::with_devices(1); 2]);
        let error = NicRates::parse("h2=1Gbit").unwrap().apply(&mut cluster).unwrap_err();
        assert_eq!(format!("{error}"), "there is no host h2\nhint: hosts are h0 to h1");
    }
}
