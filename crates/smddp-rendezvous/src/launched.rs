//! Which rank this process is, from the environment of whoever started it, and where the ranks meet.
//!
//! | launcher | rank and size | meeting point |
//! |---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | those, or this host where all ranks are on it |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | those, or this host where all ranks are on it |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | those, or the step's first host |
//!
//! A SageMaker job of several hosts under mpirun tells its first host by `SMDATAPARALLEL_SERVER_ADDR` or `SM_HOSTS`, on every
//! rank; its `MASTER_ADDR` and `MASTER_PORT` do not count, since mpirun leaves them to the ranks of its own host alone.
//! Elsewhere a Python caller asks mpirun's process manager before it gives up (`smddp.launching`).
//!
//! Rank 0 serves the store at the meeting point. The port is a function of the environment, which is the same
//! on every rank, so that nobody has to guess or to try several: the one asked for, else `MASTER_PORT` (in such a job
//! `SMDATAPARALLEL_SERVER_PORT`), else one derived from the job's identity. Under torchrun's agent (`TORCHELASTIC_USE_AGENT_STORE=True`) the agent keeps its own
//! store on `MASTER_PORT` for as long as the job lives, and ours is one port above it (one below at 65535).
//! A port that turns out to be taken is an error of rank 0 that names it.

use crate::error::{Error, Result};

/// Derived ports come from here upwards: below Linux's ephemeral ports (32768).
const DERIVED_FIRST: u16 = 20_000;
const DERIVED_COUNT: u64 = 12_000;

/// One process among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    pub rank: usize,
    pub size: usize,
    /// Index among the ranks of this host.
    pub local_rank: usize,
    /// Ranks of this host, where the launcher says how many.
    pub local_size: Option<usize>,
    /// Where rank 0's store is; `None` with a single rank.
    pub meet: Option<Meet>,
}

/// Where rank 0 serves the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meet {
    pub host: String,
    pub port: u16,
    /// All ranks are known to be on this host.
    pub local: bool,
}

impl Launched {
    /// A process that nobody started as one of several.
    pub fn alone() -> Launched {
        Launched { rank: 0, size: 1, local_rank: 0, local_size: Some(1), meet: None }
    }

    /// Whether a launcher says which rank this process is.
    pub fn by_a_launcher(get: &dyn Fn(&str) -> Option<String>) -> bool {
        let env = Env { get };
        LAUNCHERS.iter().any(|launcher| env.has(launcher.rank))
    }

    /// Reads the environment through `get`; `port` is the one asked for, `parent` the parent's process id (the same
    /// for all ranks that one launcher started on this host).
    ///
    /// # Errors
    /// [`Error::Usage`] naming the variable that is missing or makes no sense.
    pub fn detect(get: &dyn Fn(&str) -> Option<String>, port: Option<u16>, parent: u32) -> Result<Launched> {
        let env = Env { get };
        let Some(launcher) = LAUNCHERS.iter().find(|l| env.has(l.rank)) else {
            return match env.first(&["WORLD_SIZE"]) {
                Some((name, size)) if size != "1" => Err(missing("RANK", &format!("{name} is {size}"))),
                _ => Ok(Launched::alone()),
            };
        };
        let rank = env.number(&[launcher.rank])?.unwrap_or(0);
        let size = env.number(launcher.size)?.ok_or_else(|| {
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
        let local_rank = env.number(launcher.local_rank)?.unwrap_or(0);
        let local_size = match env.number(launcher.local_size)? {
            None if launcher.rank == "SLURM_PROCID" => slurm_tasks_here(&env)?,
            told => told,
        };
        let local = local_size == Some(size);
        let meet = if size == 1 { None } else { Some(meet(&env, launcher, port, parent, local)?) };
        Ok(Launched { rank, size, local_rank, local_size, meet })
    }
}

struct Launcher {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    /// What is the same on all ranks of this job and different in others; all that are set count.
    job: &'static [&'static str],
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        job: &["TORCHELASTIC_RUN_ID"],
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        job: &["PMI_ID_JOB", "HYDRA_JOBID"],
    },
    Launcher {
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

fn meet(env: &Env, launcher: &Launcher, port: Option<u16>, parent: u32, local: bool) -> Result<Meet> {
    let mpi = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].contains(&launcher.rank);
    if mpi
        && !local
        && let Some(host) = env.text("SMDATAPARALLEL_SERVER_ADDR").or_else(|| sm_host(env))
    {
        let port = match (port, env.port("SMDATAPARALLEL_SERVER_PORT")?) {
            (Some(port), _) | (None, Some(port)) => port,
            (None, None) => job_port(env, launcher, None)?,
        };
        return Ok(Meet { host, port, local: false });
    }
    let slurm = launcher.rank == "SLURM_PROCID";
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
    let first_node = || env.first(&lists).filter(|_| slurm).map(|(_, list)| first_host(&list));
    let host = if let Some(host) = env.text("MASTER_ADDR") {
        host
    } else if local {
        "127.0.0.1".into()
    } else if let Some(host) = first_node() {
        host
    } else {
        let why = "the ranks may be on several hosts, and the first rank's address is not known";
        return Err(missing("MASTER_ADDR", why));
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
    Ok(Meet { host, port, local: local || host_is_loopback(env) })
}

/// A port that the job's identity gives; where nothing names the job, the `parent` of all its ranks stands for it.
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

/// The first of a SageMaker job's hosts: `["algo-1","algo-2"]`.
fn sm_host(env: &Env) -> Option<String> {
    let hosts = env.text("SM_HOSTS")?;
    hosts.split('"').nth(1).filter(|host| !host.is_empty()).map(str::to_owned)
}

/// How many tasks of the step Slurm started on this node, from a list such as `4(x2),3`.
fn slurm_tasks_here(env: &Env) -> Result<Option<usize>> {
    let (Some(each), Some(node)) = (env.text("SLURM_STEP_TASKS_PER_NODE"), env.number(&["SLURM_NODEID"])?)
    else {
        return Ok(None);
    };
    let mut before = 0;
    for part in each.split(',') {
        let (tasks, times) = part.split_once("(x").unwrap_or((part, "1)"));
        let (Ok(tasks), Ok(times)) = (tasks.parse(), times.trim_end_matches(')').parse::<usize>()) else {
            return Ok(None);
        };
        before = usize::saturating_add(before, times);
        if node < before {
            return Ok(Some(tasks));
        }
    }
    Ok(None)
}

/// A loopback `MASTER_ADDR` says that all ranks are here.
fn host_is_loopback(env: &Env) -> bool {
    env.text("MASTER_ADDR")
        .is_some_and(|host| host == "localhost" || host.starts_with("127.") || host == "::1")
}

fn missing(name: &str, why: &str) -> Error {
    Error::Usage(format!("{name} is not set: {why} (torchrun, mpirun, srun and smddprun set it)"))
}

fn derived_port(job: &str) -> u16 {
    // FNV-1a: the same on every host and in every build.
    let hash =
        job.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
    DERIVED_FIRST + (hash % DERIVED_COUNT) as u16
}

/// The first host of a Slurm list such as `a[03-07,9]-x,b1`.
fn first_host(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().unwrap_or(list).into();
    };
    let (range, rest) = rest.split_once(']').unwrap_or((rest, ""));
    let first = range.split([',', '-']).next().unwrap_or(range);
    let suffix = rest.split(',').next().unwrap_or("");
    format!("{prefix}{first}{}", if suffix.contains('[') { first_host(suffix) } else { suffix.into() })
}

struct Env<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn first<'n>(&self, names: &[&'n str]) -> Option<(&'n str, String)> {
        names.iter().find_map(|name| self.text(name).map(|value| (*name, value)))
    }

    fn number(&self, names: &[&str]) -> Result<Option<usize>> {
        let Some((name, value)) = self.first(names) else {
            return Ok(None);
        };
        let parsed = value.parse();
        parsed
            .map(Some)
            .map_err(|_| Error::Usage(format!("{name} is '{value}', which is not a whole number")))
    }

    fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(number) = self.number(&[name])? else { return Ok(None) };
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        port.map(Some).ok_or_else(|| Error::Usage(format!("{name} is {number}, which is not a port")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(vars: &[(&str, &str)]) -> Result<Launched> {
        Launched::detect(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).into()), None, 77)
    }

    fn address(vars: &[(&str, &str)]) -> (String, u16) {
        let meet = detect(vars).unwrap().meet.unwrap();
        (meet.host, meet.port)
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "10.0.0.5"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn no_launcher_is_one_rank() {
        assert_eq!(detect(&[]).unwrap(), Launched::alone());
        assert_eq!(detect(&[("MASTER_PORT", "1234"), ("SLURM_NTASKS", "8")]).unwrap(), Launched::alone());
    }

    #[test]
    fn torchrun_is_read_whole() {
        let meet = Meet { host: "10.0.0.5".into(), port: 29500, local: false };
        let want = Launched { rank: 3, size: 4, local_rank: 1, local_size: None, meet: Some(meet) };
        assert_eq!(detect(&TORCHRUN).unwrap(), want);
    }

    #[test]
    fn the_agents_port_is_left_to_the_agent() {
        let mut vars = TORCHRUN.to_vec();
        vars.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        assert_eq!(address(&vars).1, 29501);
        vars[4].1 = "65535";
        assert_eq!(address(&vars).1, 65534);
        vars[5].1 = "False";
        assert_eq!(address(&vars).1, 65535);
    }

    #[test]
    fn local_mpi_ranks_need_no_address() {
        let openmpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-host-1234@1"),
        ];
        let (host, port) = address(&openmpi);
        assert_eq!(host, "127.0.0.1");
        assert!((DERIVED_FIRST..32768).contains(&port));
        // Without a job's name the launcher's process id stands for it.
        let mpich =
            [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "0")];
        assert_eq!(address(&mpich), ("127.0.0.1".into(), derived_port("77")));
    }

    #[test]
    fn slurm_meets_at_its_first_host() {
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "99"),
            ("SLURM_STEP_NODELIST", "node[07-08,11],other1"),
        ];
        assert_eq!(address(&slurm).0, "node07");
        assert_eq!(detect(&slurm).unwrap().local_rank, 1);
        for (list, first) in [("a", "a"), ("a,b[1-2]", "a"), ("a[3,5]-x,b", "a3-x"), ("r[1-2]n[3-4]", "r1n3")]
        {
            assert_eq!(first_host(list), first);
        }
    }

    #[test]
    fn slurm_tells_how_many_tasks_a_node_has() {
        for (list, node, tasks) in
            [("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("2", "0", 2)]
        {
            let vars = [
                ("SLURM_PROCID", "1"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_JOB_ID", "9"),
                ("SLURM_JOB_NODELIST", "a"),
                ("SLURM_STEP_TASKS_PER_NODE", list),
                ("SLURM_NODEID", node),
            ];
            assert_eq!(detect(&vars).unwrap().local_size, Some(tasks), "{list} {node}");
        }
    }

    #[test]
    fn a_sagemaker_job_tells_its_first_host() {
        let mut vars = vec![
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "job"),
            ("SM_HOSTS", r#"["algo-1","algo-2"]"#),
        ];
        assert_eq!(address(&vars).0, "algo-1");
        vars.extend([("SMDATAPARALLEL_SERVER_ADDR", "algo-9"), ("SMDATAPARALLEL_SERVER_PORT", "7592")]);
        assert_eq!(address(&vars), ("algo-9".into(), 7592));
        // mpirun leaves them to the ranks of its own host alone.
        vars.extend([("MASTER_ADDR", "algo-1"), ("MASTER_PORT", "7777")]);
        assert_eq!(address(&vars), ("algo-9".into(), 7592));
        vars.retain(|(name, _)| !name.starts_with("SMDATAPARALLEL"));
        assert_eq!(address(&vars), ("algo-1".into(), derived_port("job")));
    }

    #[test]
    fn what_is_missing_is_named() {
        let says = |vars: &[(&str, &str)], name: &str| {
            let error = detect(vars).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        says(&[("WORLD_SIZE", "2")], "RANK is not set");
        says(&[("RANK", "0")], "WORLD_SIZE is not set");
        says(&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set");
        says(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")], "MASTER_PORT is not set");
        says(&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is 2, but there are 2 ranks");
        says(&[("RANK", "0"), ("WORLD_SIZE", "1000000000")], "WORLD_SIZE is 1000000000: expected at most");
        says(&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is 'x'");
        says(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")], "MASTER_ADDR is not set");
        let mut vars = TORCHRUN.to_vec();
        vars[4].1 = "70000";
        says(&vars, "MASTER_PORT is 70000");
    }

    #[test]
    fn one_rank_needs_no_meeting_point() {
        assert_eq!(detect(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().meet, None);
    }
}
