#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crossmesh_comm::lab::fuzz::frames(data));
