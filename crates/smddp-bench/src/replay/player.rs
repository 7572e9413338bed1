//! Execution of one rank's steps, with the recorded delays between them.

use std::collections::HashMap;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Work};

use super::script::{Action, Step};
use crate::calls::{Memory, start};
use crate::error::Result;

/// Maximum overrun of a sleep.
const SLEEP_OVERRUN: Duration = Duration::from_micros(150);

pub(crate) struct Player<'a> {
    /// The communicators of this rank's groups, by index in the script.
    pub comms: &'a HashMap<usize, Communicator>,
    /// Speedup of the delays; infinite: no delays.
    pub speed: f64,
    pub timeout: Duration,
}

/// A started call.
struct PendingCall {
    work: Work,
    memory: Memory,
}

impl Player<'_> {
    /// Runs all steps, and returns when all calls are done. The failure of a group ends only the steps of that group.
    pub(crate) fn play(&self, steps: &[Step]) -> Result<()> {
        let (mut pending, mut free) = (HashMap::new(), self.pool(steps)?);
        let mut reached = Instant::now();
        for (at, step) in steps.iter().enumerate() {
            for before in &step.after {
                if wait_for(pending.remove(before), &mut free) {
                    reached = Instant::now();
                }
            }
            let Some(comm) = self.comms.get(&step.group) else { continue };
            if comm.error().is_some() {
                continue;
            }
            // Allocates memory before the call's start time.
            let memory = match &step.action {
                Action::Call(planned) => Some(take_memory(&mut free, planned.longest())?),
                Action::Leave => None,
            };
            wait_until(reached + step.gap.div_f64(self.speed));
            reached = Instant::now();
            match (&step.action, memory) {
                (Action::Call(planned), Some(memory)) => {
                    // If the next step waits for this call, this thread runs it synchronously.
                    let synchronous = steps.get(at + 1).is_some_and(|next| next.after.contains(&at));
                    match start(comm, planned, &memory, synchronous) {
                        Ok(Some(work)) => drop(pending.insert(at, PendingCall { work, memory })),
                        Ok(None) => {
                            free.push(memory);
                            reached = Instant::now();
                        }
                        // The call is invalid.
                        Err(error @ smddp_core::Error::Invalid(_)) => return Err(error.into()),
                        // The group has recorded its error; other groups continue.
                        Err(_) => reached = Instant::now(),
                    }
                }
                _ => drop(comm.shutdown_checked(self.timeout)),
            }
        }
        for (_, last) in pending {
            wait_for(Some(last), &mut free);
        }
        Ok(())
    }

    /// Allocates memory for the longest call in advance.
    fn pool(&self, steps: &[Step]) -> Result<Vec<Memory>> {
        let longest = |step: &Step| match &step.action {
            Action::Call(planned) => planned.longest(),
            Action::Leave => 0,
        };
        Ok(vec![Memory::new(steps.iter().map(longest).max().unwrap_or(0))?])
    }
}

/// Waits for a pending call. The memory of a successful call becomes free.
fn wait_for(pending: Option<PendingCall>, free: &mut Vec<Memory>) -> bool {
    let Some(PendingCall { work, memory }) = pending else { return false };
    if work.wait(None).is_ok() {
        free.push(memory);
    }
    true
}

/// Takes the smallest free memory that is long enough, or allocates it.
fn take_memory(free: &mut Vec<Memory>, bytes: usize) -> Result<Memory> {
    let fits =
        (0..free.len()).filter(|&at| free[at].capacity() >= bytes).min_by_key(|&at| free[at].capacity());
    match fits {
        Some(at) => Ok(free.swap_remove(at)),
        None => Memory::new(bytes),
    }
}

fn wait_until(time: Instant) {
    loop {
        let left = time.saturating_duration_since(Instant::now());
        match left {
            Duration::ZERO => return,
            _ if left > SLEEP_OVERRUN => sleep(left - SLEEP_OVERRUN),
            _ => yield_now(),
        }
    }
}
