//! One rank's part: its steps, each as late after the one before as it was recorded.

use std::collections::HashMap;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Work};

use super::script::{Step, What};
use crate::calls::{Memory, make};
use crate::error::Result;

/// A sleep may take so much longer than it should.
const SLEEPS: Duration = Duration::from_micros(150);

pub(crate) struct Player<'a> {
    /// By the script's groups; those that this rank is in.
    pub comms: &'a HashMap<usize, Communicator>,
    /// How many times as quick; infinite: nobody waits for the sake of time.
    pub speed: f64,
    pub timeout: Duration,
}

/// A call that was started.
struct Flying {
    work: Work,
    memory: Memory,
}

impl Player<'_> {
    /// Makes all steps; what ends a group ends its steps and no other's. Returns when all calls are over.
    pub(crate) fn play(&self, steps: &[Step]) -> Result<()> {
        let (mut flying, mut free) = (HashMap::new(), self.pool(steps)?);
        let mut reached = Instant::now();
        for (at, step) in steps.iter().enumerate() {
            for before in &step.after {
                if land(flying.remove(before), &mut free) {
                    reached = Instant::now();
                }
            }
            let Some(comm) = self.comms.get(&step.group) else { continue };
            if comm.error().is_some() {
                continue;
            }
            // Memory that is not there yet takes its time before the call, not of it.
            let memory = match &step.what {
                What::Call(planned) => Some(taken(&mut free, planned.longest())?),
                What::Leave => None,
            };
            wait_until(reached + step.gap.div_f64(self.speed));
            reached = Instant::now();
            match (&step.what, memory) {
                (What::Call(planned), Some(memory)) => {
                    // What the next step waits for is driven by this thread, as a synchronous call is.
                    let alone = steps.get(at + 1).is_some_and(|next| next.after.contains(&at));
                    match make(comm, planned, &memory, alone) {
                        Ok(Some(work)) => drop(flying.insert(at, Flying { work, memory })),
                        Ok(None) => {
                            free.push(memory);
                            reached = Instant::now();
                        }
                        // The call itself is none.
                        Err(error @ smddp_core::Error::Invalid(_)) => return Err(error.into()),
                        // The group's own error says why; others may go on.
                        Err(_) => reached = Instant::now(),
                    }
                }
                _ => drop(comm.shutdown_checked(self.timeout)),
            }
        }
        for (_, last) in flying {
            land(Some(last), &mut free);
        }
        Ok(())
    }

    /// Memory for the longest call, so that most need not wait for any.
    fn pool(&self, steps: &[Step]) -> Result<Vec<Memory>> {
        let longest = |step: &Step| match &step.what {
            What::Call(planned) => planned.longest(),
            What::Leave => 0,
        };
        Ok(vec![Memory::new(steps.iter().map(longest).max().unwrap_or(0))?])
    }
}

/// Waits for a call, if it is still to be waited for; its memory is free again where it ended well.
fn land(flying: Option<Flying>, free: &mut Vec<Memory>) -> bool {
    let Some(Flying { work, memory }) = flying else { return false };
    if work.wait(None).is_ok() {
        free.push(memory);
    }
    true
}

/// The smallest that is long enough.
fn taken(free: &mut Vec<Memory>, bytes: usize) -> Result<Memory> {
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
            _ if left > SLEEPS => sleep(left - SLEEPS),
            _ => yield_now(),
        }
    }
}
