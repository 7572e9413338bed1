//! Fuzzing without a fuzzer: runs a target on the stored corpus, on random inputs, and on mutated corpus
//! inputs. The tests of each crate with fuzz targets include this file.

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Number of random and of mutated inputs for fast targets.
pub(crate) const MANY: u32 = 1500;

/// Runs `entry` on the corpus `name`, then on `inputs` random and `inputs` mutated inputs.
pub(crate) fn over(name: &str, entry: fn(&[u8]), inputs: u32) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let kept: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    for (file, bytes) in files.iter().zip(&kept) {
        // Prints the file name, because the text of a panic does not contain it.
        println!("{}", file.display());
        entry(bytes);
    }
    let config = Config { cases: inputs, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let run = |bytes: Vec<u8>| {
        entry(&bytes);
        Ok(())
    };
    runner.run(&vec(any::<u8>(), 0..600), run).unwrap();
    let changes = vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
    let changed = (prop::sample::select(kept), changes, vec(any::<u8>(), 0..40)).prop_map(
        |(mut bytes, changes, more): (Vec<u8>, Vec<(prop::sample::Index, u8)>, Vec<u8>)| {
            bytes.extend(more);
            for (at, value) in changes {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] = value;
                }
            }
            bytes
        },
    );
    runner.run(&changed, run).unwrap();
}
