//! Builds the shared libraries by calling the compiler directly. Cargo builds no `cdylib` of a dependency, and the
//! tests' own binaries must not define functions like cuInit.

use std::path::{Path, PathBuf};
use std::process::Command;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn library(source: &Path, object: &Path) {
    let mut command = Command::new(variable("RUSTC"));
    // The linker that cargo uses for a target other than this machine.
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        command.arg("-C").arg(format!("linker={linker}"));
    }
    command
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "cuda"])
        .args(["--target", &variable("TARGET")])
        .args(["-C", "panic=abort", "-C", "opt-level=2", "-C", "debuginfo=0"])
        .args(["-C", "link-arg=-Wl,-soname,libcuda.so.1", "-o"])
        .arg(object)
        .arg(source);
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn main() {
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(variable("OUT_DIR"));
    for (source, object, name) in [
        ("src/fake/root.rs", "libcuda.so.1", "FAKE_LIBCUDA"),
        ("src/ancient.rs", "libcuda-ancient.so.1", "FAKE_LIBCUDA_ANCIENT"),
    ] {
        library(&here.join(source), &out.join(object));
        println!("cargo::rustc-env={name}={}", out.join(object).display());
    }
    for source in ["src/fake", "src/ancient.rs", "../smddp-cuda/src/driver/types.rs", "build.rs"] {
        assert!(here.join(source).exists(), "{source}");
        println!("cargo::rerun-if-changed={source}");
    }
}
