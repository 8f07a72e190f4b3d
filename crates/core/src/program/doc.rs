//! Programs as documents.
