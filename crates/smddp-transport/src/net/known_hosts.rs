//! Hosts with which this process has had a connection. One of them that answers no call any more has fallen silent; one that
//! never did may be out of reach, as where a network takes other packets than those of TCP alone.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Mutex;

use crate::fork::PerProcess;
use crate::lock;

static HOSTS: PerProcess<Mutex<HashSet<IpAddr>>> = PerProcess::new();

pub(crate) fn record(host: IpAddr) {
    lock(HOSTS.get()).insert(host);
}

pub(crate) fn contains(host: IpAddr) -> bool {
    lock(HOSTS.get()).contains(&host)
}
