//! The first call that failed.
//!
//! A device is asked for much before any of it is done, and no call of [`crate::kernels::Kernels`] but `finish` can say that it failed. So the first failure is kept,
//! what is asked for behind it is skipped, and `finish` tells.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crossmesh_cuda::CudaError;

/// See the module.
#[derive(Debug, Default)]
pub struct Failure {
    is_set: AtomicBool,
    first: Mutex<Option<CudaError>>,
}

impl Failure {
    /// What a call returns, unless one failed before it or it fails.
    pub fn unless<T>(&self, call: impl FnOnce() -> Result<T, CudaError>) -> Option<T> {
        if self.is_set.load(Ordering::Acquire) {
            return None;
        }
        match call() {
            Ok(value) => Some(value),
            Err(error) => {
                let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                self.is_set.store(true, Ordering::Release);
                None
            }
        }
    }

    /// The first failure. It stays: a device that failed once did not do what was asked for behind it.
    pub fn check(&self) -> Result<(), CudaError> {
        match &*self.first.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_stays_and_what_comes_behind_is_skipped() {
        let failure = Failure::default();
        assert_eq!(failure.unless(|| Ok(1)), Some(1));
        assert_eq!(failure.check(), Ok(()));
        let first = CudaError::Taken { ranks: 2, count: 1 };
        assert_eq!(failure.unless(|| Err::<i32, _>(first.clone())), None);
        let mut was_called = false;
        let second = failure.unless(|| {
            was_called = true;
            Err::<i32, _>(CudaError::NotBuilt)
        });
        assert_eq!((second, was_called), (None, false));
        assert_eq!(failure.check(), Err(first.clone()));
        assert_eq!(failure.check(), Err(first));
    }
}
