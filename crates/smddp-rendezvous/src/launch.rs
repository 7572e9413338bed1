//! This process's rank, from the launcher's environment, and the rendezvous address.
//!
//! | launcher | rank and size | local rank | address of rank 0 |
//! |---|---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `_LOCAL_RANK` | those, or this host where all ranks are on it |
//! | MVAPICH2 | `MV2_COMM_WORLD_RANK`, `_SIZE` | `_LOCAL_RANK` | the same |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID` | the same |
//! | HPE PALS | `PALS_RANKID`, `PMI_SIZE` | `PALS_LOCAL_RANKID`, `PMI_LOCAL_RANK` | the same |
//! | Flux | `FLUX_TASK_RANK`, `FLUX_JOB_SIZE` | `FLUX_TASK_LOCAL_ID` | the same |
//! | jsrun | `JSM_NAMESPACE_RANK`, `_SIZE` | `_LOCAL_RANK` | the same |
//! | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID` | those, or the step's first host |
//!
//! In a SageMaker job of several hosts under mpirun, `SMDATAPARALLEL_SERVER_ADDR` or `SM_HOSTS` name the first host on every
//! rank. `MASTER_ADDR` and `MASTER_PORT` are ignored there, since mpirun passes them only to the ranks on its own host.
//! In other jobs a Python caller asks mpirun's process manager for a missing address (`smddp.launch`).
//!
//! Rank 0 serves the store at that address. The port is a function of the environment, which is the same on every rank:
//! the requested port, else `MASTER_PORT` (in a SageMaker job `SMDATAPARALLEL_SERVER_PORT`), else a port derived from the
//! job's identity. Under torchrun's agent (`TORCHELASTIC_USE_AGENT_STORE=True`) the agent keeps its store on `MASTER_PORT`
//! while the job runs, and this store uses the next port (the previous port at 65535). If the port is in use, rank 0 fails
//! with an error that names it.

mod environment;
mod launchers;
mod slurm;
#[cfg(test)]
mod tests;

use self::environment::Env;
use self::launchers::{LAUNCHERS, Launcher, SLURM};
use crate::error::{Error, Result};

/// The first derived port: all are below Linux's ephemeral ports (32768).
const DERIVED_FIRST: u16 = 20_000;
const DERIVED_COUNT: u64 = 12_000;

/// Rank, size and rendezvous address of one process of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnvironment {
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Index among the ranks of this host; `None` where the launcher does not set it.
    pub local_rank: Option<usize>,
    /// Number of ranks on this host, where the launcher sets it.
    pub local_size: Option<usize>,
    /// Address of rank 0's store; `None` with a single rank.
    pub address: Option<RendezvousAddress>,
}

/// Address at which rank 0 serves the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousAddress {
    /// Host name or IP address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// All ranks are known to be on this host.
    pub local: bool,
}

impl LaunchEnvironment {
    /// Returns the environment of a process without a launcher: rank 0 of 1.
    pub fn single() -> LaunchEnvironment {
        LaunchEnvironment { rank: 0, size: 1, local_rank: Some(0), local_size: Some(1), address: None }
    }

    /// Returns true if a launcher set this process's rank.
    pub fn is_launched(get: &dyn Fn(&str) -> Option<String>) -> bool {
        let env = Env { get };
        LAUNCHERS.iter().any(|launcher| env.has(launcher.rank))
    }

    /// Reads the environment through `get`. `port` is the requested port, `parent` the parent's process id, which is the
    /// same for all ranks that one launcher started on this host.
    ///
    /// # Errors
    /// [`Error::Usage`] naming the variable that is missing or invalid, and the command that sets it.
    pub fn detect(
        get: &dyn Fn(&str) -> Option<String>,
        port: Option<u16>,
        parent: u32,
    ) -> Result<LaunchEnvironment> {
        let env = Env { get };
        let Some(launcher) = Launcher::find(&env) else {
            check_single(&env)?;
            return Ok(LaunchEnvironment::single());
        };
        if launcher.rank == SLURM {
            slurm::check_step(&env)?;
        }
        let rank = env.number(&[launcher.rank])?.unwrap_or(0);
        // A batch script of one task has a rank but no number of tasks.
        let batch = launcher.rank == SLURM && rank == 0 && !slurm::in_step(&env);
        let size = env.number(launcher.size)?.or(batch.then_some(1)).ok_or_else(|| {
            missing(
                launcher.size.last().copied().unwrap_or_default(),
                &format!("{} is {rank}", launcher.rank),
            )
        })?;
        if size == 0 || rank >= size {
            return Err(Error::Usage(format!(
                "{} is {rank}, but there are {size} ranks ({})",
                launcher.rank,
                launcher.size.join(", ")
            )));
        }
        if size > smddp_core::MAX_RANKS {
            return Err(Error::Usage(format!(
                "{} is {size}: expected at most {} ranks",
                launcher.size.iter().find(|name| env.has(name)).copied().unwrap_or_default(),
                smddp_core::MAX_RANKS
            )));
        }
        let local_size = launcher.local_size(&env, size)?.or((size == 1).then_some(1));
        let local = local_size == Some(size);
        let local_rank = match launcher.local_rank(&env)? {
            None if local => Some(rank),
            None if local_size == Some(1) => Some(0),
            found => found,
        };
        let address =
            if size == 1 { None } else { Some(rendezvous_address(&env, launcher, port, parent, local)?) };
        Ok(LaunchEnvironment { rank, size, local_rank, local_size, address })
    }
}

/// Refuses a process without a rank in a job of several processes.
fn check_single(env: &Env) -> Result<()> {
    if let Some(size) = env.text("WORLD_SIZE").filter(|size| size != "1") {
        return Err(missing("RANK", &format!("WORLD_SIZE is {size}")));
    }
    // torchrun's own settings in a container of Kubeflow's Trainer.
    if let Some(hosts) = env.number(&["PET_NNODES"]).ok().flatten().filter(|hosts| *hosts > 1) {
        return Err(Error::Usage(format!(
            "RANK is not set: PET_NNODES is {hosts}, so this container is one of several: start the script with `torchrun \
             script.py`"
        )));
    }
    // PMIx gives its clients the size through its library alone.
    if let Some(rank) = env.text("PMIX_RANK") {
        return Err(Error::Usage(format!(
            "PMIX_RANK is {rank}, and no variable gives the number of ranks: start the script with mpirun, srun or torchrun, \
             or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )));
    }
    Ok(())
}

fn rendezvous_address(
    env: &Env,
    launcher: &Launcher,
    port: Option<u16>,
    parent: u32,
    local: bool,
) -> Result<RendezvousAddress> {
    if launcher.is_mpi()
        && !local
        && let Some(host) = env.text("SMDATAPARALLEL_SERVER_ADDR").or_else(|| sm_host(env))
    {
        let port = match (port, env.port("SMDATAPARALLEL_SERVER_PORT")?) {
            (Some(port), _) | (None, Some(port)) => port,
            (None, None) => job_port(env, launcher, None)?,
        };
        return Ok(RendezvousAddress { host, port, local: false });
    }
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
    let first_node = || {
        let slurm = launcher.rank == SLURM;
        env.first(&lists).filter(|_| slurm).map(|(_, list)| slurm::first_host(&list))
    };
    let host = if let Some(host) = env.text("MASTER_ADDR") {
        host
    } else if local {
        "127.0.0.1".into()
    } else if let Some(host) = first_node() {
        host
    } else {
        return Err(Error::Usage(format!(
            "MASTER_ADDR is not set: the ranks may be on several hosts, and {} gives no address of rank 0: start them with \
             `{}`",
            launcher.rank, launcher.address_command
        )));
    };
    let port = match (port, env.port("MASTER_PORT")?) {
        (Some(port), _) => port,
        (None, Some(master)) => {
            let taken =
                env.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
            match (taken, master) {
                (false, _) => master,
                (true, u16::MAX) => master - 1,
                (true, _) => master + 1,
            }
        }
        (None, None) => job_port(env, launcher, local.then_some(parent))?,
    };
    Ok(RendezvousAddress { host, port, local: local || host_is_loopback(env) })
}

/// A port derived from the job's identity, or from the `parent` of all its ranks where no variable names the job.
fn job_port(env: &Env, launcher: &Launcher, parent: Option<u32>) -> Result<u16> {
    let job: Vec<_> = launcher.job.iter().filter_map(|name| env.text(name)).collect();
    match (job.is_empty(), parent) {
        (false, _) => Ok(derived_port(&job.join("/"))),
        (true, Some(parent)) => Ok(derived_port(&parent.to_string())),
        (true, None) => {
            Err(missing("MASTER_PORT", "nothing names the job, so no port can be derived from it"))
        }
    }
}

/// Returns the first host of a SageMaker job: `["algo-1","algo-2"]`.
fn sm_host(env: &Env) -> Option<String> {
    let hosts = env.text("SM_HOSTS")?;
    hosts.split('"').nth(1).filter(|host| !host.is_empty()).map(str::to_owned)
}

/// A loopback `MASTER_ADDR` means that all ranks are on this host.
fn host_is_loopback(env: &Env) -> bool {
    env.text("MASTER_ADDR")
        .is_some_and(|host| host == "localhost" || host.starts_with("127.") || host == "::1")
}

fn missing(name: &str, reason: &str) -> Error {
    Error::Usage(format!("{name} is not set: {reason} (torchrun, mpirun, srun and smddprun set it)"))
}

fn derived_port(job: &str) -> u16 {
    // FNV-1a: the same on every host and in every build.
    let hash =
        job.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
    DERIVED_FIRST + (hash % DERIVED_COUNT) as u16
}
