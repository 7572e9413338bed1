//! Slurm's lists of nodes and tasks, and jobs without a step.

use super::environment::Env;
use crate::error::{Error, Result};

/// Rejects a batch script that runs without `srun` in an allocation of several tasks. Such a process has a rank and the
/// allocation's number of tasks, but no step.
pub(super) fn check_step(env: &Env) -> Result<()> {
    match env.number(&["SLURM_NTASKS"])? {
        _ if in_step(env) => Ok(()),
        None | Some(1) => Ok(()),
        Some(tasks) => Err(Error::Usage(format!(
            "SLURM_NTASKS is {tasks}, but no srun started this process (SLURM_STEP_ID is not set), so the other {} ranks do \
             not exist: run `srun python script.py` in the batch script, `smddprun --nproc N python script.py` for ranks on \
             this host alone, or `srun -n 1 python script.py` for one rank",
            tasks.saturating_sub(1)
        ))),
    }
}

/// Returns true if srun started this process.
pub(super) fn in_step(env: &Env) -> bool {
    let step = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"];
    env.first(&step).is_some() || env.has("SLURM_STEP_TASKS_PER_NODE")
}

/// Returns the number of the step's tasks on this node, from a list such as `4(x2),3`.
pub(super) fn tasks_on_this_node(env: &Env) -> Result<Option<usize>> {
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

/// Returns the first host of a list such as `a[03-07,9]-x,b1`.
pub(super) fn first_host(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().unwrap_or(list).into();
    };
    let (range, rest) = rest.split_once(']').unwrap_or((rest, ""));
    let first = range.split([',', '-']).next().unwrap_or(range);
    let suffix = rest.split(',').next().unwrap_or("");
    format!("{prefix}{first}{}", if suffix.contains('[') { first_host(suffix) } else { suffix.into() })
}
