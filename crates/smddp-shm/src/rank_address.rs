//! Identity of a rank, and the place of its control block in shared memory.

use serde::{Deserialize, Serialize};
use smddp_base::host_name;
pub(crate) use smddp_process::{ProcessAddress, outer_uid};

/// Identity of one rank of a group, and the place of its control block. Ranks exchange it when the group is created.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankAddress {
    /// Rank in the group.
    pub rank: u32,
    /// Number of ranks in the group.
    pub size: u32,
    /// Name of the host.
    pub host: String,
    /// Kernel boot id. Together with `netns` it determines the reach of abstract sockets and shared memory.
    pub boot: String,
    /// Inode of the network namespace; 0 if it is unknown.
    pub netns: u64,
    /// Process id, in the PID namespace of the process.
    pub pid: u32,
    /// User id as seen from the parent user namespace.
    pub uid: u32,
    /// Address of the process.
    pub process: ProcessAddress,
    /// Offset of this rank's control block in the shared memory of `process`, in bytes.
    pub block: u64,
    /// Number that identifies the group among all groups whose control blocks were at this offset.
    pub nonce: u64,
}

/// Returns the id of this boot. Without /proc it is derived from the host name, so that two hosts differ.
fn boot_of(found: Option<String>) -> String {
    let found = found.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    found.unwrap_or_else(|| format!("unknown boot of {}", host_name()))
}

impl RankAddress {
    /// Returns the address of a rank of this process.
    pub(super) fn new(
        (rank, size): (usize, usize),
        process: ProcessAddress,
        (block, nonce): (u64, u64),
    ) -> Self {
        Self {
            rank: rank as u32,
            size: size as u32,
            host: host_name(),
            boot: boot_of(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()),
            netns: std::fs::metadata("/proc/self/ns/net")
                .map(|m| std::os::unix::fs::MetadataExt::ino(&m))
                .unwrap_or(0),
            pid: std::process::id(),
            uid: outer_uid(),
            process,
            block,
            nonce,
        }
    }

    /// Returns "rank 3 (host h1, pid 812)".
    pub fn name(&self) -> String {
        format!("rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }
}
