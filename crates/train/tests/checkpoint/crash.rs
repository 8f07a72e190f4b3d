//! A process that saves without end is killed at random moments, and started again.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crossmesh_train::checkpoint::Convert;
use crossmesh_train::kernels::random::Stream;

use crate::world::{World, small, store};

const ROUNDS: u64 = 40;
const FOLDER: &str = "CROSSMESH_TEST_CRASH_FOLDER";

fn world() -> World {
    let mut world = small(["A{dp:2,tp:2}", "B{tp:3}", "C{dp:2}"], 1);
    // Large enough that there are moments inside a write.
    world.weights[0].shape = vec![1301, 60];
    world
}

/// The other process: goes on from the latest one, as a run does, and says what is complete.
#[test]
#[ignore = "the child of `a_crash_leaves_the_last_complete_one`"]
#[allow(clippy::print_stdout)]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let store = store(Path::new(&folder), 2);
    for step in store.steps().unwrap().last().copied().unwrap_or(0) + 1.. {
        world().save::<f32>(&store, step).unwrap();
        println!("saved {step}");
    }
}

#[test]
fn a_crash_leaves_the_last_complete_one() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), 2);
    let mut last = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::child", "--ignored", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let saved = |line: String| line.strip_prefix("saved ")?.parse::<u64>().ok();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut saves = lines.filter_map(saved);
        // Now and then before there is anything new, else somewhere in the saves behind the first one.
        let first = if round % 4 == 0 { None } else { saves.next() };
        let moment = Duration::from_micros(u64::from(Stream::new(5, round, 0).at(0)) % 60_000);
        let said = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(moment);
                child.kill().unwrap();
                child.wait().unwrap();
            });
            saves.last().or(first)
        });
        last = said.unwrap_or(last);
        let latest = store.steps().unwrap().last().copied().unwrap_or(0);
        assert!(latest >= last, "step {last} was complete, and now {latest} is the latest");
        if latest > 0 {
            world().load::<f32>(&store.complete(latest), Convert::No).unwrap();
        }
        last = latest;
    }
    assert!(last >= ROUNDS * 3 / 4, "every round but the early ones saves something");
}
