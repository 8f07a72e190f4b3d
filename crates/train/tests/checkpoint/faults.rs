//! Damage of every kind is found, and named; nothing is passed over in silence.

use std::fs;
use std::path::{Path, PathBuf};

use crossmesh_train::checkpoint::{Checkpoint, Convert, Store};

use crate::world::{World, facts, small, store};

fn world() -> World {
    small(["A{dp:2,tp:2}", "B{tp:3}", "C{dp:2}"], 1)
}

/// Steps 1 and 2, saved.
fn saved(folder: &Path) -> (Store, PathBuf) {
    let store = store(folder, 3);
    world().save::<f32>(&store, 1).unwrap();
    let path = world().save::<f32>(&store, 2).unwrap();
    (store, path)
}

/// Loading step 2 fails with a message that has all of this in it; step 1 still loads, for those who ask.
fn assert_refused(folder: &Path, store: &Store, words: &[&str]) {
    let path = store.latest().unwrap().expect("the newest complete one is the newest complete one");
    assert_eq!(path, store.complete(2));
    let error = world().load::<f32>(&path, Convert::No).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "{error:?} should say {word:?}");
    }
    let (good, faults) = store.latest_loadable().unwrap();
    assert_eq!(good.unwrap().folder(), folder.join("step-00000001"));
    assert_eq!(faults.len(), 1);
    assert_eq!(faults[0].path, path);
    world().load::<f32>(&store.complete(1), Convert::No).unwrap();
}

#[test]
fn truncated_files() {
    for keep in [0, 7, 100, -1i64] {
        let folder = tempfile::tempdir().unwrap();
        let (store, path) = saved(folder.path());
        let file = path.join("rank-004.safetensors");
        let bytes = fs::read(&file).unwrap();
        let len = if keep < 0 { bytes.len() - 1 } else { keep as usize };
        fs::write(&file, &bytes[..len]).unwrap();
        let was = format!("it is {len} bytes long, and {} were written", bytes.len());
        assert_refused(folder.path(), &store, &["rank-004.safetensors", &was]);
    }
}

#[test]
fn missing_files() {
    let folder = tempfile::tempdir().unwrap();
    let (store, path) = saved(folder.path());
    fs::remove_file(path.join("rank-008.safetensors")).unwrap();
    assert_refused(folder.path(), &store, &["rank-008.safetensors: it is missing"]);
}

#[test]
fn swapped_files() {
    let folder = tempfile::tempdir().unwrap();
    let (store, path) = saved(folder.path());
    let (a, b, c) = (path.join("rank-004.safetensors"), path.join("rank-005.safetensors"), path.join("c"));
    fs::rename(&a, &c).unwrap();
    fs::rename(&b, &a).unwrap();
    fs::rename(&c, &b).unwrap();
    assert_refused(folder.path(), &store, &["rank-004.safetensors: it is rank-005.safetensors"]);
}

#[test]
fn every_flipped_bit_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let (store, path) = saved(folder.path());
    let file = path.join("rank-001.safetensors");
    let bytes = fs::read(&file).unwrap();
    for i in (0..bytes.len()).step_by(13) {
        let mut damaged = bytes.clone();
        damaged[i] ^= 1 << (i % 8);
        fs::write(&file, damaged).unwrap();
        let error = Checkpoint::open(&path).and_then(|c| c.verify()).unwrap_err().to_string();
        assert!(error.contains("rank-001.safetensors: it is not what was written"), "{error}");
    }
    assert_refused(folder.path(), &store, &["rank-001.safetensors: it is not what was written"]);
}

#[test]
fn every_flipped_bit_of_the_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let (store, path) = saved(folder.path());
    let file = path.join("manifest.json");
    let bytes = fs::read(&file).unwrap();
    for i in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[i] ^= 1 << (i % 7);
        fs::write(&file, damaged).unwrap();
        let error = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(error.contains("manifest.json"), "{error}");
    }
    assert_refused(folder.path(), &store, &["manifest.json"]);
}

#[test]
fn another_version_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let file = path.join("manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("crossmesh.checkpoint/1", "crossmesh.checkpoint/2")).unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(
        error.to_string().contains("/2 is not the schema `crossmesh.checkpoint/1`\nhint: another version"),
        "{error}"
    );
}

#[test]
fn a_disk_that_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 1);
    let partial = folder.path().join(".step-00000003.partial");
    world().save::<f32>(&store, 1).unwrap();
    fs::create_dir_all(&partial).unwrap();
    std::os::unix::fs::symlink("/dev/full", partial.join("rank-002.safetensors")).unwrap();
    let error = world().save::<f32>(&store, 3).unwrap_err().to_string();
    assert!(error.contains("rank 2 could not save: cannot write"), "{error}");
    assert!(error.contains("rank-002.safetensors") && error.contains("hint: make room"), "{error}");
    assert!(!partial.exists(), "half a checkpoint is removed");
    assert_eq!(store.steps().unwrap(), [1]);
    world().load::<f32>(&store.complete(1), Convert::No).unwrap();
}

/// Whatever keeps a checkpoint from its name, what was written of it does not stay: it may be what fills the disk.
#[test]
fn what_cannot_be_completed_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 1);
    let partial = folder.path().join(".step-00000003.partial");
    world().save::<f32>(&store, 1).unwrap();
    // All ranks write their files, and then this is in the way.
    fs::create_dir_all(partial.join("of somebody else")).unwrap();
    let error = world().save::<f32>(&store, 3).unwrap_err().to_string();
    assert!(error.contains("cannot remove") && error.contains("of somebody else"), "{error}");
    assert!(!partial.exists(), "half a checkpoint is removed");
    assert_eq!(store.steps().unwrap(), [1]);
}

/// Folders that are called nearly as ours are, such as a copy made by hand, are none of ours.
#[test]
fn names_that_are_not_ours_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 1);
    let path = world().save::<f32>(&store, 1).unwrap();
    for name in ["step-7", "step-+0000008", "step-000000009"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::copy(path.join("manifest.json"), folder.path().join(name).join("manifest.json")).unwrap();
    }
    assert_eq!(store.latest().unwrap(), Some(path));
    world().save::<f32>(&store, 2).unwrap();
    assert_eq!(store.steps().unwrap(), [2]);
    assert!(folder.path().join("step-7").exists());
}

#[test]
fn a_folder_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = world().save::<f32>(&store(&file.join("inside"), 1), 1).unwrap_err().to_string();
    assert!(error.contains("cannot create") && error.contains("file/inside"), "{error}");
}

#[test]
fn parts_that_are_no_whole_are_not_committed() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 1);
    let world = world();
    let reports = || {
        let ranks = world.ranks::<f32>().into_iter().enumerate();
        let writing: Vec<_> = ranks.map(|(r, h)| store.write(world.snapshot::<f32>(r, &h, 4))).collect();
        writing.into_iter().map(|w| w.report()).collect::<Vec<_>>()
    };
    let refused = |reports: &[Vec<u8>], step: u64, word: &str| {
        let error = store.commit(&facts(step), reports).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert!(store.steps().unwrap().is_empty());
    };
    let all = reports();
    refused(&all[..8], 4, "elements are there");
    refused(&[&all[..3], &all[4..]].concat(), 4, "rank 3 is missing");
    refused(&[&all[..], &all[..1]].concat(), 4, "rank 1 is missing or there twice");
    refused(&all, 5, "rank 0 wrote step 4");
    refused(&[&all[..8], &[b"{".to_vec()]].concat(), 4, "a report is damaged");
    refused(&all, 4, "it is not here");
    let complete = store.commit(&facts(4), &reports()).unwrap();
    world.load::<f32>(&complete, Convert::No).unwrap();
}

/// Tied weights are saved by one stage, and it is an error if two do.
#[test]
fn what_two_stages_save_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 1);
    let world = world();
    let mut ranks = world.ranks::<f32>();
    ranks.iter_mut().flatten().for_each(|h| h.elsewhere.clear());
    let writing: Vec<_> =
        ranks.iter().enumerate().map(|(r, h)| store.write(world.snapshot::<f32>(r, h, 4))).collect();
    let reports: Vec<_> = writing.into_iter().map(|w| w.report()).collect();
    let error = store.commit(&facts(4), &reports).unwrap_err().to_string();
    assert!(error.contains("`wte.weight`"), "{error}");
}

#[test]
fn old_ones_go_and_leftovers_too() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 2);
    let names = || {
        let names =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    fs::create_dir_all(folder.path().join(".step-00000099.partial")).unwrap();
    for step in 1..=5 {
        world().save::<f32>(&store, step).unwrap();
    }
    assert_eq!(names(), ["step-00000004", "step-00000005"]);
    // Saved again, with other contents and more files than it had.
    let fewer = small(["A{dp:1}", "B{dp:1}", "C{dp:1}"], 0);
    fewer.save::<f32>(&store, 5).unwrap();
    fewer.load::<f32>(&store.complete(5), Convert::No).unwrap();
    assert_eq!(names(), ["step-00000004", "step-00000005"]);
    // The run went back to before 4: what is saved now is the latest, and what it left stays to be looked at.
    world().save::<f32>(&store, 3).unwrap();
    assert_eq!(store.latest().unwrap(), Some(store.complete(3)));
    assert_eq!(names(), ["step-00000003", "step-00000004.set-aside", "step-00000005.set-aside"]);
}

/// An attempt at a step by more ranks leaves files that the next attempt at it has no use for.
#[test]
fn files_of_a_larger_attempt_do_not_stay() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 2);
    let partial = folder.path().join(".step-00000001.partial");
    fs::create_dir_all(&partial).unwrap();
    for name in ["rank-000.safetensors", "rank-017.safetensors", "manifest.json"] {
        fs::write(partial.join(name), vec![7; 10_000]).unwrap();
    }
    let path = world().save::<f32>(&store, 1).unwrap();
    assert_eq!(fs::read_dir(&path).unwrap().count(), world().num_ranks() + 1);
    world().load::<f32>(&path, Convert::No).unwrap();
}

#[test]
fn there_may_be_none() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder.path().join("not yet"), 1);
    assert_eq!(store.latest().unwrap(), None);
    assert!(store.latest_loadable().unwrap().0.is_none());
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("there is no checkpoint here"), "{error}");
}
