//! Events of the simulation and their keys in the queue.

/// An event of the simulation, with the index of its flight or pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// The first byte of a flight arrives.
    Arrive(u32),
    /// The first byte of a flight has passed the sender's rail and reaches the uplink of the node.
    Uplink(u32),
    /// The sender of a flight receives its completion.
    Complete(u32),
    /// A pipeline continues.
    Run(u32),
}

/// Packs the event number (so that equal times keep their order), kind and index.
pub(super) fn pack(number: u64, event: Event) -> u64 {
    let (kind, index) = match event {
        Event::Arrive(index) => (0, index),
        Event::Complete(index) => (1, index),
        Event::Run(index) => (2, index),
        Event::Uplink(index) => (3, index),
    };
    // 34 bits of number, 2 of kind, 28 of index. Numbers may wrap, because they only order events of equal time.
    number << 30 | kind << 28 | u64::from(index)
}

/// Returns the event of a key of [`pack`].
pub(super) fn unpack(key: u64) -> Event {
    let index = (key & ((1 << 28) - 1)) as u32;
    match key >> 28 & 3 {
        0 => Event::Arrive(index),
        1 => Event::Complete(index),
        2 => Event::Run(index),
        _ => Event::Uplink(index),
    }
}
