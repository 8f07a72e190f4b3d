#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crossmesh_testkit::fuzz::program_json(data));
