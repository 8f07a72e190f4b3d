//! The binary `crossmesh`.

use std::process::ExitCode;

fn main() -> ExitCode {
    crossmesh_cli::main()
}
