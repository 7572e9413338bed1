#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| smddp_testing::frame(bytes));
