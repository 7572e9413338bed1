//! Opens the libfabric of this machine, if installed, and prints its providers.
//!
//! `LIBFABRIC_PATHS`: further libraries to open, separated by colons.

#![allow(clippy::unwrap_used, reason = "helpers of a test")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use libfabric_sys::*;

/// "2.1 at /x/libfabric.so.1 (loader path): tcp: lo eth0; ...".
fn describe(library: &Library) -> String {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let hints = library.hints().unwrap();
    // SAFETY: the hints have all attributes allocated, and this function owns them.
    unsafe {
        (*hints.as_ptr()).caps = FI_MSG | FI_RMA;
        (*(*hints.as_ptr()).ep_attr).kind = FI_EP_RDM;
        (*(*hints.as_ptr()).domain_attr).mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
        (*hints.as_ptr()).mode = FI_CONTEXT | FI_CONTEXT2;
    }
    match library.info(library.interface(), Some(&hints)) {
        Ok(list) => {
            for info in list.iter() {
                assert!(!info.raw().ep_attr.is_null() && !info.raw().domain_attr.is_null());
                found.entry(info.provider().to_owned()).or_default().push(info.domain().to_owned());
            }
        }
        Err(code) => return format!("{:?}: no provider ({})", library.path(), library.error(code)),
    }
    format!("{} at {} ({}): {found:?}", library.version(), library.path().display(), library.place())
}

#[test]
fn installed_library_lists_its_providers() {
    match Library::open(None) {
        Ok(library) => {
            println!("{}", describe(&library));
            assert!(library.interface() <= library.version());
            assert!(library.interface().major <= 2);
            assert!(library.path().is_absolute(), "{:?}", library.path());
        }
        Err(missing) => {
            // A machine without libfabric passes the test; the error lists every path.
            println!("{missing}");
            let text = missing.to_string();
            assert!(text.contains("libfabric.so.1 (already loaded): not loaded"), "{text}");
            assert!(
                text.contains("/opt/amazon/efa/lib/libfabric.so.1 (EFA installer's directory)"),
                "{text}"
            );
            assert!(text.contains("libfabric.so.1 (loader path)"), "{text}");
        }
    }
}

#[test]
fn one_binary_opens_every_listed_library() {
    let Some(paths) = std::env::var_os("LIBFABRIC_PATHS") else {
        println!("LIBFABRIC_PATHS names no further libraries");
        return;
    };
    for path in std::env::split_paths(&paths).filter(|p| p != Path::new("")).collect::<Vec<PathBuf>>() {
        let library = Library::open(Some(&path)).unwrap();
        println!("{}", describe(&library));
    }
}
