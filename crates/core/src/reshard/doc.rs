//! The plan document, `crossmesh.plan/1`.
