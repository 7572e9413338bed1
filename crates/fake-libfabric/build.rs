//! Builds the shared object. A Cargo `cdylib` has no symbol versions, which the tests need. Therefore this script compiles
//! the library to an archive and links it.

use std::path::{Path, PathBuf};
use std::process::Command;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn main() {
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(variable("OUT_DIR"));
    let (archive, object) = (out.join("libfake.a"), out.join("libfabric.so.1"));
    let linked = out.join("libfabric.so.1.new");
    run(Command::new(variable("RUSTC"))
        .args(["--edition", "2024", "--crate-type", "staticlib", "--crate-name", "fake"])
        .args(["--target", &variable("TARGET")])
        .args(["-C", "panic=abort", "-C", "relocation-model=pic", "-C", "opt-level=1", "-o"])
        .arg(&archive)
        .arg(here.join("src/fake.rs")));
    let compiler =
        std::env::var("RUSTC_LINKER").or_else(|_| std::env::var("CC")).unwrap_or_else(|_| "cc".to_owned());
    run(Command::new(compiler)
        .args(["-shared", "-o"])
        .arg(&linked)
        .arg(format!("-Wl,--version-script={}", here.join("src/fake.map").display()))
        .args(["-Wl,-soname,libfake-fabric.so.1", "-Wl,--whole-archive"])
        .arg(&archive)
        .args(["-Wl,--no-whole-archive", "-lpthread", "-ldl", "-lm"]));
    // Running tests keep the former file.
    std::fs::rename(&linked, &object).unwrap_or_else(|error| panic!("{}: {error}", linked.display()));
    for source in ["src", "build.rs", "../libfabric-sys/src/types.rs"] {
        assert!(Path::new(&here).join(source).exists(), "{source}");
        println!("cargo::rerun-if-changed={source}");
    }
    println!("cargo::rerun-if-changed=../libfabric-sys/src/types");
    println!("cargo::rustc-env=FAKE_LIBFABRIC={}", object.display());
}
