//! `--protect`: ranks agree on it and run, or refuse each other and say why.

mod common;

use common::crossmesh;

/// Two ranks that say they are on two hosts, so that they talk over TCP.
fn run(launch: &[&str], script: &str) -> common::Said {
    let program = env!("CARGO_BIN_EXE_crossmesh");
    let layouts = "'u8[100000]@A{x:1}(_)' 'u8[100000]@B{x:1}(_)'";
    let script = format!("{script}; export CROSSMESH_HOST=h$RANK; exec {program} run {layouts} --arrive 5s");
    crossmesh(&[&["launch", "-n", "2"][..], launch, &["--", "sh", "-c", &script]].concat())
}

#[test]
fn protected_ranks_run_and_check_every_element() {
    for way in ["none", "sign", "encrypt"] {
        let said = run(&["--protect", way], ":");
        assert_eq!(said.code, 0, "{way}: {}", said.stderr);
        assert!(said.stdout.contains("every element checked"), "{way}: {}", said.stdout);
    }
}

#[test]
fn ranks_that_disagree_refuse_each_other_by_name() {
    let said = run(&[], "test $RANK = 1 && export CROSSMESH_PROTECT=encrypt");
    assert_eq!(said.code, 2, "{}", said.stdout);
    let mismatch = "the other side has --protect";
    assert!(said.stderr.contains(mismatch), "{}", said.stderr);
    assert!(said.stderr.contains("encrypt") && said.stderr.contains("none"), "{}", said.stderr);
}

#[test]
fn another_word_is_refused_with_those_there_are() {
    let said = crossmesh(&["run", "u8[4]@A{x:1}(_)", "u8[4]@B{x:1}(_)", "--protect", "aes"]);
    assert_eq!(said.code, 2);
    assert!(said.stderr.contains("`aes` is no way to protect a connection"), "{}", said.stderr);
}
