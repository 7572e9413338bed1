//! Bounded reads of files that the user names.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Returns the content of a regular file of at most `limit` bytes, and its metadata at the time of opening. Never
/// blocks: a FIFO, a device or a socket is an error.
///
/// # Errors
///
/// The system's error; `InvalidInput` if it is not a regular file; `FileTooLarge` for more than `limit` bytes.
pub fn read(path: &Path, limit: usize) -> io::Result<(Vec<u8>, Metadata)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let too_large = || io::Error::new(ErrorKind::FileTooLarge, format!("larger than {limit} bytes"));
    if about.len() > limit as u64 {
        return Err(too_large());
    }
    // The file may grow during the read.
    let mut bytes = Vec::new();
    file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > limit { Err(too_large()) } else { Ok((bytes, about)) }
}

/// Returns the text of such a file.
///
/// # Errors
///
/// As [`read`]; `InvalidData` if it is not UTF-8.
pub fn read_text(path: &Path, limit: usize) -> io::Result<String> {
    let (bytes, _) = read(path, limit)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn read_rejects_special_and_large_files_without_blocking() {
        let folder = std::env::temp_dir().join(format!("smddp-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::fs::write(at("small"), [b'a'; 64]).unwrap();
        std::fs::write(at("large"), [b'a'; 65]).unwrap();
        File::create(at("huge")).unwrap().set_len(2 << 30).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let begun = Instant::now();
        assert_eq!(read_text(&at("small"), 64).unwrap().len(), 64);
        for (path, expected) in [
            (at("fifo"), "not a regular file"),
            ("/dev/zero".into(), "not a regular file"),
            (folder.clone(), "not a regular file"),
            (at("large"), "larger than 64 bytes"),
            (at("huge"), "larger than 64 bytes"),
            // The reported size is 0.
            ("/proc/self/environ".into(), "larger than 64 bytes"),
            (at("missing"), "No such file"),
            (at("socket"), "No such device"),
        ] {
            let text = read(&path, 64).unwrap_err().to_string();
            assert!(text.contains(expected), "{}: {text}", path.display());
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
