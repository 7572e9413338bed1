//! What tests over the fake driver share. Its settings hold for a process, so each test body runs in one of its own:
//! this binary again, with this test alone.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(dead_code, reason = "each test binary uses its part")]

mod world;

use std::ffi::CStr;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_libcuda::PATH;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use smddp_cuda::driver::Cuda;
use smddp_cuda::{Address, Copy, Device, Stream};
pub(crate) use world::function;

/// Says in a process what it is there for.
const ROLE: &str = "SMDDP_TEST_ROLE";
/// With which settings: a test may run its body with several.
const CASE: &str = "SMDDP_TEST_CASE";
/// The descriptor of its end of a connection to the process that started it.
const SOCKET: &str = "SMDDP_TEST_SOCKET";

/// No step of a test takes longer, however slow the machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The command, and this side of a connection to what it starts.
fn myself(test: &str, role: &str, settings: &[(&str, &str)]) -> (Command, UnixStream, UnixStream) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    // SAFETY: between fork and exec; a system call alone.
    unsafe {
        let fd = theirs.as_raw_fd();
        command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command.args(["--exact", test, "--test-threads=1"]).env(ROLE, role);
    command.env(SOCKET, theirs.as_raw_fd().to_string());
    for name in std::env::vars_os().map(|(name, _)| name) {
        let text = name.to_string_lossy();
        if role == "body" && (text.starts_with("FAKE_CUDA_") || text == "CUDA_VISIBLE_DEVICES") {
            command.env_remove(name);
        }
    }
    command.envs(settings.iter().copied());
    if role == "body" {
        command.env(CASE, format!("{settings:?}"));
    }
    (command, ours, theirs)
}

/// The connection to the process that started this one.
fn starter() -> UnixStream {
    use std::os::fd::FromRawFd;
    let fd = std::env::var(SOCKET).unwrap().parse().unwrap();
    // SAFETY: handed down by the process that started this one, for this purpose alone.
    let socket = unsafe { UnixStream::from_raw_fd(fd) };
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    // A stream that waits for ever shall not hold up the tests for ever.
    let (tell, up) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = tell.send(());
        std::thread::sleep(LIMIT);
        eprintln!("the test has not ended in {LIMIT:?}");
        std::process::abort();
    });
    // What a thread maps as it begins would come where a test has just freed memory.
    let _ = up.recv();
    socket
}

/// Runs `body` in a process with these settings of the fake.
pub(crate) fn with(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    match std::env::var(ROLE).as_deref() {
        Err(_) => {
            let (mut command, ours, theirs) = myself(test, "body", settings);
            let output = command.output().unwrap();
            drop(theirs);
            let said = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(output.status.success(), "{test} with {settings:?}: {}\n{said}", output.status);
            assert_eq!((&ours).read(&mut [0; 2]).unwrap(), 1, "the body has run once: {said}");
        }
        Ok("body") if std::env::var(CASE) == Ok(format!("{settings:?}")) => {
            let starter = starter();
            body();
            say(&starter, &[1]);
        }
        Ok(_) => {}
    }
}

/// Runs `one` and `other` in two processes with these settings and a connection between them.
pub(crate) fn with_peer(
    test: &str,
    settings: &[(&str, &str)],
    one: impl FnOnce(&UnixStream),
    other: impl FnOnce(&UnixStream),
) {
    if std::env::var(ROLE).as_deref() == Ok("peer") {
        // Its starter's, handed down.
        if std::env::var(CASE) != Ok(format!("{settings:?}")) {
            return;
        }
        let starter = starter();
        other(&starter);
        return say(&starter, &[0]);
    }
    with(test, settings, || {
        let (mut command, ours, theirs) = myself(test, "peer", &[]);
        let mut child = Ended(command.spawn().unwrap());
        drop(theirs);
        one(&ours);
        assert_eq!(hear::<1>(&ours), [0], "the other process ended well");
        let status = child.0.wait().unwrap();
        assert!(status.success(), "{test}, the other process: {status}");
    });
}

/// Does not outlive the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn open() -> Arc<Cuda> {
    Cuda::open(Some(PATH.as_ref())).unwrap()
}

pub(crate) fn device(ordinal: i32) -> Arc<Device> {
    open().device(ordinal).unwrap()
}

/// How often the fake's function of that name was called.
pub(crate) fn calls(name: &CStr) -> u64 {
    // SAFETY: the type of that function.
    unsafe { function::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>(c"fake_calls")(name.as_ptr()) }
}

/// What is open in the fake.
pub(crate) fn things() -> u64 {
    // SAFETY: the type of that function.
    unsafe { function::<unsafe extern "C" fn() -> u64>(c"fake_open")() }
}

/// Host memory that the device knows, filled.
pub(crate) fn host(device: &Device, bytes: &[u8]) -> Address {
    let memory = device.allocate_host(bytes.len()).unwrap();
    // SAFETY: new memory of that size.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len()) };
    memory as Address
}

/// What is in host memory.
pub(crate) fn bytes(address: Address, count: usize) -> Vec<u8> {
    // SAFETY: the tests' own memory, and its streams are empty.
    unsafe { std::slice::from_raw_parts(address as *const u8, count) }.to_vec()
}

/// Device memory, filled.
pub(crate) fn filled(device: &Device, stream: Stream, contents: &[u8]) -> Address {
    let address = device.allocate(contents.len()).unwrap();
    put(device, stream, address, contents);
    address
}

pub(crate) fn put(device: &Device, stream: Stream, to: Address, contents: &[u8]) {
    let from = host(device, contents);
    // SAFETY: both live until the stream is empty.
    unsafe {
        device.copy(stream, &[Copy { to, from, bytes: contents.len() }]).unwrap();
        device.synchronize(stream).unwrap();
        device.free_host(from as *mut u8);
    }
}

/// What is in device memory.
pub(crate) fn contents(device: &Device, stream: Stream, from: Address, count: usize) -> Vec<u8> {
    let to = host(device, &vec![0; count]);
    // SAFETY: both live until the stream is empty.
    unsafe {
        device.copy(stream, &[Copy { to, from, bytes: count }]).unwrap();
        device.synchronize(stream).unwrap();
        let found = bytes(to, count);
        device.free_host(to as *mut u8);
        found
    }
}

/// Waits for something that other threads do.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

/// A page of words that streams and processes share, mapped here.
pub(crate) fn page(fd: &OwnedFd) -> *mut u8 {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    rustix::fs::ftruncate(fd, 4096).unwrap();
    // SAFETY: a new mapping, never taken away.
    unsafe {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        mmap(std::ptr::null_mut(), 4096, flags, MapFlags::SHARED, fd, 0).unwrap().cast()
    }
}

pub(crate) fn memfd() -> OwnedFd {
    rustix::fs::memfd_create(c"words", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

pub(crate) fn say(mut socket: &UnixStream, bytes: &[u8]) {
    socket.write_all(bytes).unwrap();
}

pub(crate) fn hear<const N: usize>(mut socket: &UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

pub(crate) fn send(socket: &UnixStream, fd: &OwnedFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    rustix::net::sendmsg(socket, &[IoSlice::new(b"d")], &mut control, SendFlags::empty()).unwrap();
}

pub(crate) fn receive(socket: &UnixStream) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags).unwrap();
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .unwrap()
}
