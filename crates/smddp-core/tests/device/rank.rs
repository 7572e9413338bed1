//! A rank with a device: a process of a checked world, a caller's stream, and calls on data that this stream writes.

use std::sync::Arc;
use std::time::Duration;

use smddp_core::{Blocks, Call, Collective, Communicator, DType, DeviceStream, Options, RedOp, Result, Work};
use smddp_cuda::{Address, Copy, Device, Stream};
use smddp_group::joint::Joined;

use crate::common::{shape, value};
use crate::processes::{map_at, unmap};
use crate::world::{World, become_process, download, open_device, upload};

pub(crate) struct Rank {
    pub(crate) device: Arc<Device>,
    pub(crate) comm: Communicator,
    /// The caller's stream.
    pub(crate) stream: Stream,
}

impl Rank {
    pub(crate) fn on(&self) -> DeviceStream {
        DeviceStream { device: self.device.clone(), stream: self.stream }
    }
}

/// Runs ranks as threads. Each is a separate process of the world, with device `which(rank)`.
pub(crate) fn ranks_on<T: Send>(
    world: &World,
    links: Vec<Joined>,
    timeout: Duration,
    which: impl Fn(usize) -> i32 + Sync,
    body: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    let ranks: Vec<usize> = links.iter().map(|_| world.process()).collect();
    std::thread::scope(|scope| {
        let handles: Vec<_> = links
            .into_iter()
            .zip(ranks)
            .map(|(Joined { group: link, nodes, .. }, rank)| {
                let (body, which) = (&body, &which);
                scope.spawn(move || {
                    become_process(rank);
                    let device = open_device(which(rank));
                    let comm = Communicator::from_group(link, &nodes, "test", timeout);
                    let stream = device.create_stream().unwrap();
                    let rank = Rank { device, comm, stream };
                    let result = body(&rank);
                    rank.comm.close();
                    let _ = rank.device.synchronize(rank.stream);
                    rank.device.destroy_stream(rank.stream);
                    result
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Runs ranks as threads, all on device 0.
pub(crate) fn ranks<T: Send>(
    world: &World,
    links: Vec<Joined>,
    timeout: Duration,
    body: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    ranks_on(world, links, timeout, |_| 0, body)
}

/// Kind of a job's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Allocated like cudaMalloc.
    Legacy,
    /// Like torch's expandable segments: a separate physical allocation for each `chunk` bytes.
    Mapped { chunk: usize },
    /// Like `Mapped`, but not exportable.
    Private,
}

/// Kind and layout of a job's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    pub(crate) memory: Memory,
    /// Input and output share memory if the collective supports it.
    pub(crate) in_place: bool,
}

pub(crate) const PLAIN: Site = Site { memory: Memory::Legacy, in_place: false };

/// Device memory with a pinned host buffer of the same size for transfers.
struct Buffer<'a> {
    rank: &'a Rank,
    at: Address,
    /// Bytes of the mapping; 0 for an allocation.
    mapped: usize,
    pinned: *mut u8,
    /// Pattern that overwrites the memory.
    scribble: *mut u8,
    bytes: usize,
}

impl<'a> Buffer<'a> {
    fn new(rank: &'a Rank, memory: Memory, bytes: usize) -> Self {
        let (chunk, exported) = match memory {
            Memory::Legacy => (0, false),
            Memory::Mapped { chunk } => (chunk, true),
            Memory::Private => (1 << 16, false),
        };
        let mapped = bytes.max(16).checked_next_multiple_of(chunk).unwrap_or(0);
        let at = match mapped {
            0 => rank.device.allocate(bytes.max(16)).unwrap(),
            _ => map_at(None, mapped, chunk, exported),
        };
        let pinned = rank.device.allocate_host(bytes.max(16)).unwrap();
        let scribble = rank.device.allocate_host(bytes.max(16)).unwrap();
        upload(&rank.device, scribble as u64, &vec![0xa5; bytes]);
        Self { rank, at, mapped, pinned, scribble, bytes }
    }

    /// Enqueues a write of the first contents.
    fn refill(&self) {
        if self.bytes > 0 {
            let copy = Copy { to: self.at, from: self.pinned as u64, bytes: self.bytes };
            // SAFETY: as in `fill`.
            unsafe { self.rank.device.copy(self.rank.stream, &[copy]).unwrap() };
        }
    }

    /// Enqueues a write of the pattern.
    fn overwrite(&self) {
        if self.bytes > 0 {
            let copy = Copy { to: self.at, from: self.scribble as u64, bytes: self.bytes };
            // SAFETY: as in `fill`.
            unsafe { self.rank.device.copy(self.rank.stream, &[copy]).unwrap() };
        }
    }

    /// Enqueues a write of `data`.
    fn fill(&self, data: &[u8], offset: usize) {
        if data.is_empty() {
            return;
        }
        upload(&self.rank.device, self.pinned as u64 + offset as u64, data);
        let (to, from) = (self.at + offset as u64, self.pinned as u64 + offset as u64);
        // SAFETY: both remain allocated until the drop, which waits for the stream.
        unsafe { self.rank.device.copy(self.rank.stream, &[Copy { to, from, bytes: data.len() }]).unwrap() };
    }

    /// Reads the memory after all earlier work of the caller's stream.
    fn read(&self) -> Vec<u8> {
        if self.bytes == 0 {
            return Vec::new();
        }
        let copy = Copy { to: self.pinned as u64, from: self.at, bytes: self.bytes };
        // SAFETY: as in `fill`.
        unsafe { self.rank.device.copy(self.rank.stream, &[copy]).unwrap() };
        self.rank.device.synchronize(self.rank.stream).unwrap();
        download(&self.rank.device, self.pinned as u64, self.bytes)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let _ = self.rank.device.synchronize(self.rank.stream);
        // SAFETY: the stream is empty, and the job that used them is complete.
        unsafe {
            if self.mapped > 0 {
                unmap(self.at, self.mapped);
            } else {
                self.rank.device.free(self.at);
            }
            self.rank.device.free_host(self.pinned);
            self.rank.device.free_host(self.scribble);
        }
    }
}

/// Returns the bytes of small values of a type.
pub(crate) fn numbers(dtype: DType, rank: usize, count: usize) -> Vec<u8> {
    let value = |i: usize| value(rank, i);
    match dtype {
        DType::F32 => (0..count).flat_map(|i| value(i).to_le_bytes()).collect(),
        DType::F64 => (0..count).flat_map(|i| f64::from(value(i) / 3.0).to_le_bytes()).collect(),
        DType::F16 => (0..count).flat_map(|i| half(value(i))).collect(),
        DType::BF16 => {
            (0..count).flat_map(|i| (value(i) / 3.0).to_bits().to_le_bytes()[2..].to_vec()).collect()
        }
        DType::Bool => (0..count).map(|i| u8::from(value(i) > 15.0)).collect(),
        _ => (0..count * dtype.size()).map(|i| value(i) as u8).collect(),
    }
}

/// Converts an integer up to 31 to f16.
fn half(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    let half = if value == 0.0 { 0 } else { (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16 };
    half.to_le_bytes()
}

/// One collective with its input, and the expected output from the host collective.
pub(crate) struct Job<'a> {
    rank: &'a Rank,
    collective: Collective,
    dtype: DType,
    redop: RedOp,
    root: usize,
    input: Option<(Buffer<'a>, usize)>,
    /// The buffer, the offset of the output in bytes, and its elements.
    output: Option<(Buffer<'a>, usize, usize)>,
    pub(crate) want: Vec<u8>,
    /// Offset in bytes and elements of an input in the output's buffer.
    shared: Option<(usize, usize)>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        rank: &'a Rank,
        collective: Collective,
        (dtype, redop): (DType, RedOp),
        count: usize,
        root: usize,
        site: Site,
    ) -> Self {
        let (n, me) = (rank.comm.size(), rank.comm.rank());
        let (given, taken) = shape(collective, me == root, n, count);
        let data = given.map(|count| numbers(dtype, me, count));
        let want = host_result(&rank.comm, collective, (dtype, redop), root, data.as_deref(), taken);
        let mut job =
            Self { rank, collective, dtype, redop, root, input: None, output: None, want, shared: None };
        let buffer = |count: usize| Buffer::new(rank, site.memory, count * dtype.size());
        if let Some(count) = taken {
            let output = buffer(count);
            // Overwrites the output, as earlier work of the caller's stream would.
            output.overwrite();
            job.output = Some((output, 0, count));
        }
        if let (Some(count), Some(data)) = (given, data) {
            // Equal shapes use the same address; otherwise the input is this rank's block of the output.
            let place = match (&job.output, taken) {
                (Some(_), Some(out)) if out == count => Some(0),
                (Some(_), Some(_)) if collective == Collective::AllGather => Some(me * count * dtype.size()),
                (Some(_), Some(_)) if collective == Collective::Gather => Some(me * count * dtype.size()),
                _ => None,
            };
            match (site.in_place, place, &job.output) {
                (true, Some(offset), Some((output, ..))) => {
                    output.fill(&data, offset);
                    job.shared = Some((offset, count));
                }
                _ => {
                    let input = buffer(count);
                    input.fill(&data, 0);
                    job.input = Some((input, count));
                }
            }
        }
        job
    }

    /// Creates a job whose input and output share one buffer at these element offsets, on ranks that have both.
    pub(crate) fn overlapping(
        rank: &'a Rank,
        collective: Collective,
        count: usize,
        root: usize,
        (input_at, output_at): (usize, usize),
    ) -> Self {
        let (n, me) = (rank.comm.size(), rank.comm.rank());
        let (dtype, redop) = (DType::F32, RedOp::Sum);
        let (Some(given), Some(taken)) = shape(collective, me == root, n, count) else {
            return Self::new(rank, collective, (dtype, redop), count, root, PLAIN);
        };
        let data = numbers(dtype, me, given);
        let want = host_result(&rank.comm, collective, (dtype, redop), root, Some(&data), Some(taken));
        let end = (input_at + given).max(output_at + taken);
        let buffer = Buffer::new(rank, Memory::Legacy, end * dtype.size());
        buffer.overwrite();
        let [from, to] = [input_at, output_at].map(|element| element * dtype.size());
        buffer.fill(&data, from);
        let (output, shared) = (Some((buffer, to, taken)), Some((from, given)));
        Self { rank, collective, dtype, redop, root, input: None, output, want, shared }
    }

    /// Restores the input on the caller's stream.
    pub(crate) fn refill(&self) {
        if let Some((input, _)) = &self.input {
            input.refill();
        }
    }

    pub(crate) fn start(&self) -> Result<Work> {
        let flat = |at: Address, count: usize| Blocks::Flat { ptr: at as *mut u8, count };
        let output = self
            .output
            .as_ref()
            .map_or(Blocks::None, |(buffer, offset, count)| flat(buffer.at + *offset as u64, *count));
        let input = match (&self.input, &self.output) {
            (Some((buffer, count)), _) => flat(buffer.at, *count),
            (None, Some((buffer, ..))) => match self.shared {
                Some((offset, count)) => flat(buffer.at + offset as u64, count),
                None => Blocks::None,
            },
            _ => Blocks::None,
        };
        let Self { collective, dtype, redop, root, .. } = *self;
        let call = Call { collective, dtype, redop, root, input, output };
        // SAFETY: the buffers live as long as the job. Their drop first waits for the caller's stream, which waits
        // for the call.
        unsafe { self.rank.comm.start(&call, Options { on: Some(self.rank.on()), ..Options::default() }) }
    }

    /// Makes the caller's stream wait for the work, and then overwrites the input.
    pub(crate) fn finish(&self, work: &Work) -> Result<()> {
        work.wait_stream(self.rank.stream)?;
        if let Some((input, _)) = &self.input {
            input.overwrite();
        }
        Ok(())
    }

    /// Overwrites the output on the caller's stream.
    pub(crate) fn overwrite(&self) {
        if let Some((output, ..)) = &self.output {
            output.overwrite();
        }
    }

    pub(crate) fn check(&self) {
        let Some((output, first, _)) = &self.output else { return };
        let found = &output.read()[*first..][..self.want.len()];
        if let Some(at) = (0..found.len()).find(|&i| found[i] != self.want[i]) {
            panic!(
                "{:?} of {:?} by {:?}, rank {} of {}, root {}, shared {:?}: byte {at} of {} is {}, expected {}",
                self.collective,
                self.dtype,
                self.redop,
                self.rank.comm.rank(),
                self.rank.comm.size(),
                self.root,
                self.shared,
                found.len(),
                found[at],
                self.want[at]
            );
        }
    }

    pub(crate) fn run(&self) -> Result<()> {
        let work = self.start()?;
        self.finish(&work)?;
        self.check();
        // The host waits for the call too.
        work.wait(None)
    }
}

/// Returns the output of the same call on host memory in the same group.
pub(crate) fn host_result(
    comm: &Communicator,
    collective: Collective,
    (dtype, redop): (DType, RedOp),
    root: usize,
    input: Option<&[u8]>,
    taken: Option<usize>,
) -> Vec<u8> {
    let aligned = |bytes: usize| vec![0u128; bytes.div_ceil(16)];
    let mut given = aligned(input.map_or(0, <[u8]>::len));
    if let Some(input) = input {
        // SAFETY: the vector is large enough and a separate allocation.
        unsafe { std::ptr::copy_nonoverlapping(input.as_ptr(), given.as_mut_ptr().cast(), input.len()) };
    }
    let bytes = taken.unwrap_or(0) * dtype.size();
    let mut out = aligned(bytes);
    let flat = |data: &mut Vec<u128>, count: Option<usize>| match count {
        Some(count) => Blocks::Flat { ptr: data.as_mut_ptr().cast(), count },
        None => Blocks::None,
    };
    let count = input.map(|input| input.len() / dtype.size());
    let call = Call {
        collective,
        dtype,
        redop,
        root,
        input: flat(&mut given, count),
        output: flat(&mut out, taken),
    };
    // SAFETY: the vectors outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
    // SAFETY: initialised plain numbers of at least that many bytes.
    unsafe { std::slice::from_raw_parts(out.as_ptr().cast::<u8>(), bytes) }.to_vec()
}
