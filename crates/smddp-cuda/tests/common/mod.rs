//! Helpers for tests over the fake driver. Its settings apply to a whole process, so each test body runs in a child
//! process: this binary again, with this test only.

#![allow(clippy::unwrap_used, reason = "test helpers")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

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

/// Variable with the role of a child process.
const ROLE: &str = "SMDDP_TEST_ROLE";
/// Variable with the settings of a child process. A test may run its body with several.
const CASE: &str = "SMDDP_TEST_CASE";
/// Variable with the file descriptor of the child's end of its connection to the parent.
const SOCKET: &str = "SMDDP_TEST_SOCKET";

/// Time limit of each step of a test, sufficient for a slow machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Returns the command of a child process, and both ends of a connection to it.
fn child_command(test: &str, role: &str, settings: &[(&str, &str)]) -> (Command, UnixStream, UnixStream) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    // SAFETY: runs between fork and exec, and only makes a system call.
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

/// Returns the connection to the parent process.
fn parent() -> UnixStream {
    use std::os::fd::FromRawFd;
    let fd = std::env::var(SOCKET).unwrap().parse().unwrap();
    // SAFETY: inherited from the parent process for this use only.
    let socket = unsafe { UnixStream::from_raw_fd(fd) };
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    // Aborts the process after the time limit, even if a stream never completes.
    let (started, has_started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = started.send(());
        std::thread::sleep(LIMIT);
        eprintln!("the test has not ended within {LIMIT:?}");
        std::process::abort();
    });
    // A starting thread maps memory, possibly where a test has just freed some. Waits until it has started.
    let _ = has_started.recv();
    socket
}

/// Runs `body` in a child process with these settings of the fake driver.
pub(crate) fn in_child(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    match std::env::var(ROLE).as_deref() {
        Err(_) => {
            let (mut command, ours, theirs) = child_command(test, "body", settings);
            let output = command.output().unwrap();
            drop(theirs);
            let printed = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(output.status.success(), "{test} with {settings:?}: {}\n{printed}", output.status);
            assert_eq!((&ours).read(&mut [0; 2]).unwrap(), 1, "the body did not run once: {printed}");
        }
        Ok("body") if std::env::var(CASE) == Ok(format!("{settings:?}")) => {
            let parent = parent();
            body();
            write_bytes(&parent, &[1]);
        }
        Ok(_) => {}
    }
}

/// Runs `one` and `other` in two child processes with these settings and a connection between them.
pub(crate) fn in_two_children(
    test: &str,
    settings: &[(&str, &str)],
    one: impl FnOnce(&UnixStream),
    other: impl FnOnce(&UnixStream),
) {
    if std::env::var(ROLE).as_deref() == Ok("peer") {
        // The case is inherited from the parent process.
        if std::env::var(CASE) != Ok(format!("{settings:?}")) {
            return;
        }
        let parent = parent();
        other(&parent);
        return write_bytes(&parent, &[0]);
    }
    in_child(test, settings, || {
        let (mut command, ours, theirs) = child_command(test, "peer", &[]);
        let mut child = KillOnDrop(command.spawn().unwrap());
        drop(theirs);
        one(&ours);
        assert_eq!(read_bytes::<1>(&ours), [0], "the peer process failed");
        let status = child.0.wait().unwrap();
        assert!(status.success(), "{test}, peer process: {status}");
    });
}

/// Kills the process when dropped, so that it does not outlive the test.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
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

/// Number of calls of the fake driver's function `name`.
pub(crate) fn calls(name: &CStr) -> u64 {
    // SAFETY: the type of that function.
    unsafe { function::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>(c"fake_calls")(name.as_ptr()) }
}

/// Number of open objects in the fake driver.
pub(crate) fn open_objects() -> u64 {
    // SAFETY: the type of that function.
    unsafe { function::<unsafe extern "C" fn() -> u64>(c"fake_open")() }
}

/// Allocates host memory registered with the device, with these contents.
pub(crate) fn host(device: &Device, bytes: &[u8]) -> Address {
    let memory = device.allocate_host(bytes.len()).unwrap();
    // SAFETY: new memory of that size.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len()) };
    memory as Address
}

/// Reads host memory.
pub(crate) fn bytes(address: Address, count: usize) -> Vec<u8> {
    // SAFETY: memory of the test, whose streams are empty.
    unsafe { std::slice::from_raw_parts(address as *const u8, count) }.to_vec()
}

/// Allocates device memory with these contents.
pub(crate) fn filled(device: &Device, stream: Stream, contents: &[u8]) -> Address {
    let address = device.allocate(contents.len()).unwrap();
    put(device, stream, address, contents);
    address
}

pub(crate) fn put(device: &Device, stream: Stream, to: Address, contents: &[u8]) {
    let from = host(device, contents);
    // SAFETY: both remain allocated until the stream is empty.
    unsafe {
        device.copy(stream, &[Copy { to, from, bytes: contents.len() }]).unwrap();
        device.synchronize(stream).unwrap();
        device.free_host(from as *mut u8);
    }
}

/// Reads device memory.
pub(crate) fn contents(device: &Device, stream: Stream, from: Address, count: usize) -> Vec<u8> {
    let to = host(device, &vec![0; count]);
    // SAFETY: both remain allocated until the stream is empty.
    unsafe {
        device.copy(stream, &[Copy { to, from, bytes: count }]).unwrap();
        device.synchronize(stream).unwrap();
        let found = bytes(to, count);
        device.free_host(to as *mut u8);
        found
    }
}

/// Waits until other threads make the condition true.
pub(crate) fn wait_until(description: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LIMIT, "{description}");
        std::thread::yield_now();
    }
}

/// Maps a page of words that streams and processes share.
pub(crate) fn page(fd: &OwnedFd) -> *mut u8 {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    rustix::fs::ftruncate(fd, 4096).unwrap();
    // SAFETY: a new mapping that is never unmapped.
    unsafe {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        mmap(std::ptr::null_mut(), 4096, flags, MapFlags::SHARED, fd, 0).unwrap().cast()
    }
}

pub(crate) fn memfd() -> OwnedFd {
    rustix::fs::memfd_create(c"words", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

pub(crate) fn write_bytes(mut socket: &UnixStream, bytes: &[u8]) {
    socket.write_all(bytes).unwrap();
}

pub(crate) fn read_bytes<const N: usize>(mut socket: &UnixStream) -> [u8; N] {
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
