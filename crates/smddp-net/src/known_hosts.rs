//! Hosts with which this process has had a connection. If such a host stops responding, it is lost. A host without an
//! earlier connection may be unreachable, for example in a network that does not carry TCP.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Mutex;

use smddp_base::fork::PerProcess;
use smddp_base::lock;

static HOSTS: PerProcess<Mutex<HashSet<IpAddr>>> = PerProcess::new();

/// Records a connection to that host.
pub fn record(host: IpAddr) {
    lock(HOSTS.get()).insert(host);
}

/// Returns true if this process has had a connection to that host.
pub fn contains(host: IpAddr) -> bool {
    lock(HOSTS.get()).contains(&host)
}
