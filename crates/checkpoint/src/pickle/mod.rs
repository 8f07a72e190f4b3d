//! Python's pickles, read by a machine that runs nothing, and written as Python would read them.
//!
//! A pickle is a program for a small stack machine. Whatever it would import and call is kept as a word here: a
//! [`Node::Call`] of a name with arguments. Names that are not on the reader's list are refused before anything else
//! is looked at.

mod read;
mod write;

pub use read::{Id, Node, Pickle, PickleError};
pub use write::Writer;
