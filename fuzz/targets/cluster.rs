#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| smddp_bench::fuzzing::cluster(bytes));
