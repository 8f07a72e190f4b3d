//! Checkpoints: saved on any layout, loaded on any other; damage is found; a crash at any moment leaves the last complete one.

mod crash;
mod faults;
mod hf;
mod layouts;
mod world;
