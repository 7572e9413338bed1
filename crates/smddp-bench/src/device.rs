//! Device information of the ranks, which rank 0 prints.

use serde::{Deserialize, Serialize};

use crate::calls::BenchGroup;
use crate::error::{Error, Result};

/// Bytes of one rank's record in the gather.
const RECORD: usize = 512;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Device {
    pub rank: usize,
    /// The color of the rank's group.
    pub group: i64,
    pub pid: u32,
    pub hostname: String,
    /// The local rank. The only device is the CPU.
    pub device: usize,
    pub device_hex: String,
    pub device_info: String,
    /// Boot id, equal for ranks that read the same clock.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    boot: String,
}

impl Device {
    fn mine(rank: usize, local_rank: usize, group: i64) -> Device {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let model = read("/proc/cpuinfo").lines().find_map(|line| {
            line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned())
        });
        Device {
            rank,
            group,
            pid: std::process::id(),
            hostname: short(&smddp_core::host_name(), 64),
            device: local_rank,
            device_hex: "0000:00:00".into(),
            device_info: short(&model.unwrap_or_else(|| "CPU".into()), 100),
            boot: short(read("/proc/sys/kernel/random/boot_id").trim(), 64),
        }
    }

    /// Returns the line in the table's header.
    pub(crate) fn line(&self) -> String {
        let Device { rank, group, pid, hostname, device, device_hex, device_info, .. } = self;
        format!(
            "#  Rank {rank:2} Group {group:2} Pid {pid:6} on {hostname:>10} device {device:2} [{device_hex}] {device_info}"
        )
    }
}

/// Returns the peak memory of this process in bytes, or 0 if the system does not report it.
pub(crate) fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.map_or(0, |kib: u64| kib * 1024)
}

/// Returns the devices of all ranks in rank order, and whether all ranks are on one host.
pub(crate) fn gather(world: &BenchGroup, local_rank: usize, group: i64) -> Result<(Vec<Device>, bool)> {
    let mine = Device::mine(world.rank(), local_rank, group);
    let broken = |e: serde_json::Error| Error::Io { what: "describing this rank".into(), source: e.into() };
    let mut record = serde_json::to_vec(&mine).map_err(broken)?;
    record.resize(RECORD, b' ');
    let all = world.gather_bytes(&mut record)?;
    let parsed: std::result::Result<Vec<Device>, _> =
        all.chunks(RECORD).map(serde_json::from_slice).collect();
    let mut devices = parsed.map_err(broken)?;
    let one_host = devices.iter().all(|d| d.boot == mine.boot);
    devices.iter_mut().for_each(|d| d.boot.clear());
    Ok((devices, one_host))
}

fn short(text: &str, most: usize) -> String {
    text.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(most).collect()
}
