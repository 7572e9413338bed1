//! The variables that each launcher sets for its ranks.
//!
//! Launchers can be nested: Hydra's proxies and Flux brokers are Slurm tasks. The innermost launcher started this process,
//! so [`LAUNCHERS`] is ordered from inner to outer launchers.

use super::environment::Env;

pub(super) struct Launcher {
    pub(super) rank: &'static str,
    /// A variable that only this launcher sets, if other launchers also set `rank`.
    mark: Option<&'static str>,
    pub(super) size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    /// Number of hosts, if the launcher does not set the number of local ranks.
    hosts: Option<&'static str>,
    /// Variables that are equal on all ranks of a job and differ between jobs. All variables that are set are used.
    pub(super) job: &'static [&'static str],
    /// A command that passes `MASTER_ADDR` to all ranks.
    pub(super) address_command: &'static str,
}

const DEFAULTS: Launcher = Launcher {
    rank: "",
    mark: None,
    size: &[],
    local_rank: &[],
    local_size: &[],
    hosts: None,
    job: &[],
    address_command: "mpiexec -genv MASTER_ADDR HOST python script.py",
};

pub(super) const SLURM: &str = "SLURM_PROCID";

pub(super) const LAUNCHERS: [Launcher; 9] = [
    // torchrun, smddprun, Kubeflow's PyTorchJob (without LOCAL_RANK).
    Launcher {
        rank: "RANK",
        size: &["WORLD_SIZE"],
        job: &["TORCHELASTIC_RUN_ID"],
        address_command: "torchrun --nproc-per-node 8 script.py",
        ..DEFAULTS
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        address_command: "mpirun -x MASTER_ADDR=HOST python script.py",
        ..DEFAULTS
    },
    // MVAPICH2's mpirun_rsh.
    Launcher {
        rank: "MV2_COMM_WORLD_RANK",
        size: &["MV2_COMM_WORLD_SIZE"],
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        address_command: "mpirun_rsh MASTER_ADDR=HOST python script.py",
        ..DEFAULTS
    },
    // Hydra: MPICH, Intel MPI.
    Launcher {
        rank: "PMI_RANK",
        mark: Some("MPI_LOCALRANKID"),
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        job: &["PMI_ID_JOB", "HYDRA_JOBID"],
        ..DEFAULTS
    },
    // HPE PALS: mpiexec and aprun of Cray systems.
    Launcher {
        rank: "PALS_RANKID",
        size: &["PMI_SIZE"],
        local_rank: &["PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"],
        local_size: &["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"],
        job: &["PALS_APID"],
        address_command: "mpiexec --env MASTER_ADDR=$(head -n 1 $PBS_NODEFILE) python script.py",
        ..DEFAULTS
    },
    Launcher {
        rank: "FLUX_TASK_RANK",
        size: &["FLUX_JOB_SIZE"],
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        hosts: Some("FLUX_JOB_NNODES"),
        job: &["FLUX_JOB_ID"],
        address_command: "flux run --env=MASTER_ADDR=HOST python script.py",
        ..DEFAULTS
    },
    // jsrun of LSF clusters.
    Launcher {
        rank: "JSM_NAMESPACE_RANK",
        size: &["JSM_NAMESPACE_SIZE"],
        local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
        local_size: &["JSM_NAMESPACE_LOCAL_SIZE"],
        job: &["LSB_JOBID", "JSM_NAMESPACE_ID"],
        address_command: "jsrun -E MASTER_ADDR=HOST python script.py",
        ..DEFAULTS
    },
    Launcher {
        rank: SLURM,
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        address_command: "srun python script.py",
        ..DEFAULTS
    },
    // Other process managers that speak PMI 1.
    Launcher {
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: &["PMI_LOCAL_RANK"],
        local_size: &["PMI_LOCAL_SIZE"],
        job: &["PMI_ID_JOB", "PMI_JOBID"],
        ..DEFAULTS
    },
];

impl Launcher {
    /// Returns the launcher that started this process.
    pub(super) fn find(env: &Env) -> Option<&'static Launcher> {
        LAUNCHERS.iter().find(|launcher| {
            env.has(launcher.rank)
                && launcher.mark.is_none_or(|mark| env.has(mark))
                && !launcher.is_outside_of_pmi(env)
        })
    }

    /// Returns true if PMI reports another rank or size than this launcher: then a process manager inside one of its tasks
    /// started this process. The size is compared too, since each job has a rank 0.
    fn is_outside_of_pmi(&self, env: &Env) -> bool {
        let outer = ["PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", SLURM].contains(&self.rank);
        let place = |rank: &str, size: &[&str]| (env.text(rank), env.first(size).map(|(_, value)| value));
        outer && env.has("PMI_RANK") && place("PMI_RANK", &["PMI_SIZE"]) != place(self.rank, self.size)
    }

    /// Returns true if mpirun started this process. mpirun passes some variables only to the ranks on its own host.
    pub(super) fn is_mpi(&self) -> bool {
        ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].contains(&self.rank)
    }

    pub(super) fn local_rank(&self, env: &Env) -> crate::error::Result<Option<usize>> {
        Ok(env.number(self.local_rank)?.or(env.number(&["LOCAL_RANK"])?))
    }

    pub(super) fn local_size(&self, env: &Env, size: usize) -> crate::error::Result<Option<usize>> {
        if let Some(count) = env.number(self.local_size)? {
            return Ok(Some(count));
        }
        if self.hosts.is_some_and(|hosts| env.text(hosts).as_deref() == Some("1")) {
            return Ok(Some(size));
        }
        if self.rank == SLURM
            && let Some(count) = super::slurm::tasks_on_this_node(env)?
        {
            return Ok(Some(count));
        }
        env.number(&["LOCAL_WORLD_SIZE"])
    }
}
