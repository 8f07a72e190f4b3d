//! Every kernel on the first GPU: held against f64, then timed. `crossmesh bench kernels` is the same with flags; this one builds in a minute.

#[cfg(feature = "driver")]
fn main() -> std::process::ExitCode {
    use crossmesh_cuda::cuda::lab::run::{Options, run};
    let mut args = std::env::args().skip(1);
    let checks = args.next().and_then(|n| n.parse().ok()).unwrap_or(6);
    let times = args.next().is_none_or(|what| what != "check");
    let options = Options { checks, times, seed: 7, choices: None };
    #[expect(clippy::print_stdout, reason = "its answer")]
    match run(0, &options, |line| println!("{line}")) {
        Ok(found) if found.is_right() => std::process::ExitCode::SUCCESS,
        Ok(_) => std::process::ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::from(2)
        }
    }
}

#[cfg(not(feature = "driver"))]
fn main() {
    eprintln!("error: {}", crossmesh_cuda::CudaError::NotBuilt);
}
