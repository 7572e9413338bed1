//! Fuzzing of the fabric transport: arbitrary messages of peer endpoints, and completions of posted operations.

use std::sync::{Arc, Mutex};

use smddp_fabric::endpoint::{FabricAddress, FabricEndpoint};
pub(super) use smddp_fabric::header::{Header, HeaderKind, MESSAGE_HEADER};
pub(super) use smddp_fabric::rail::Completion;
use smddp_fabric::registration::RegisteredStaging;
use smddp_fabric::wire::FabricWire;
use smddp_net::fuzzing::Script;
use smddp_process::fuzzing::endpoint;

use super::device::Device;
use super::rank::{ME, Rank, SIZE, peer};

/// First endpoint number of the peers.
const FIRST_ENDPOINT: u64 = 100;

/// Sends arbitrary messages of peers to the fabric transport, and completes its operations.
pub fn fabric(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let device = Device::new(script.yes());
    let Ok(engine) = FabricEndpoint::new(
        "script".to_owned(),
        vec![device.clone()],
        RegisteredStaging::of(&endpoint()),
        SIZE - 1,
        1 << 20,
    ) else {
        return;
    };
    let engine = Arc::new(Mutex::new(engine));
    let Ok((mut wire, mine)) = FabricWire::prepare(&engine, ME, SIZE, SIZE - 1) else { return };
    let group = mine.group();
    let addresses: Vec<Option<FabricAddress>> = (0..SIZE)
        .map(|rank| {
            // Credits and message bytes as a peer's rank info contains them.
            let (first, message) = match script.below(8) {
                0 => (script.number() as u32, script.number() as u32),
                _ => (8, 8192),
            };
            let at = mine.elsewhere(FIRST_ENDPOINT + rank as u64, first, message);
            (rank != ME).then_some(at)
        })
        .collect();
    if wire.connect(&addresses).is_err() {
        return;
    }
    let mut rank = Rank::new(Box::new(wire));
    let mut next = [0; SIZE];
    while let Some(action) = script.step() {
        match action % 8 {
            0..4 => {
                let message = message(&mut script, &mut next, group, rank.seq());
                device.message(&message);
            }
            4 => complete(&mut script, &device),
            _ => rank.act(&mut script),
        }
        rank.net.poll();
        device.with(|queues| {
            for (local, _) in &queues.reads {
                rank.check_owned(local.at, local.bytes, "memory that the device writes");
            }
        });
    }
    // Completes all operations before their memory is freed.
    device.with(|queues| {
        let completed = queues.sends.drain(..).map(|(_, context)| context);
        queues.events.extend(completed.map(Completion::Done));
        let completed = queues.reads.drain(..).map(|(_, context)| context);
        queues.events.extend(completed.map(Completion::Done));
    });
    rank.net.poll();
}

fn message(script: &mut Script<'_>, next: &mut [u64; SIZE], group: u32, seq: u64) -> Vec<u8> {
    if script.below(16) == 0 {
        return script.take(64).to_vec();
    }
    let from = peer(script);
    let kind = HeaderKind::ALL[script.below(HeaderKind::ALL.len())];
    let number = match script.below(8) {
        0 => script.number(),
        1 => next[from] + 1,
        _ => next[from],
    };
    if kind.ordered() && number == next[from] {
        next[from] += 1;
    }
    let head = Header {
        kind,
        credits: script.number() as u32,
        uses_credit: script.below(4) > 0,
        endpoint: FIRST_ENDPOINT + from as u64 + u64::from(script.below(32) == 0),
        group: if script.below(32) == 0 { script.number() as u32 } else { group },
        rank: if script.below(32) == 0 { script.number() as u32 } else { from as u32 },
        seq: number,
    };
    let mut message = vec![0; MESSAGE_HEADER];
    head.encode(&mut message);
    match kind {
        HeaderKind::First | HeaderKind::Offer => {
            let mut frame = script.frame(seq);
            let payload = script.byte() as usize;
            if kind == HeaderKind::First && script.below(4) > 0 {
                frame.bytes = payload as u64;
            }
            message.extend(frame.encode());
            if kind == HeaderKind::First {
                message.resize(message.len() + payload, 0xcd);
            } else {
                for _ in 0..script.below(8) {
                    message.extend(script.number().to_le_bytes());
                }
            }
        }
        HeaderKind::More => message.resize(MESSAGE_HEADER + script.byte() as usize, 0xcd),
        _ => {
            for _ in 0..script.below(6) {
                message.extend(script.number().to_le_bytes());
            }
        }
    }
    message
}

/// Completes a posted operation, successfully or not, or delivers a peer's write.
fn complete(script: &mut Script<'_>, device: &Device) {
    let (which, fails) = (script.below(8), script.below(16) == 0);
    let kind = script.below(8);
    let number = script.number() as u32;
    device.with(|queues| {
        let context = match kind {
            0..3 => which.checked_rem(queues.sends.len()).map(|at| queues.sends.swap_remove(at).1),
            3..6 => which.checked_rem(queues.reads.len()).map(|at| {
                let (local, context) = queues.reads.swap_remove(at);
                // SAFETY: memory that was posted for this read; `check_owned` checked that it belongs to the group.
                unsafe { local.at.write_bytes(0xef, local.bytes) };
                context
            }),
            _ => {
                queues.events.push(Completion::RemoteWrite(number));
                return;
            }
        };
        let Some(context) = context else { return };
        queues.events.push(if fails {
            Completion::Failed(Some(context), "the link is down".to_owned())
        } else {
            Completion::Done(context)
        });
    });
}
