//! Whether transfers are what they claim to be, each looked at on its own.

use crate::id::TransferId;
use crate::region::Region;
use crate::reshard::{Plan, Transfer};

use super::error::VerifyError;

pub fn check(plan: &Plan) -> Result<(), VerifyError> {
    let wholes: Vec<Region> =
        plan.problem.reshards.iter().map(|r| Region::whole(r.src.layout.shape())).collect();
    let mut named_by = vec![u32::MAX; plan.transfers().len()];
    // By region: a tensor that it fits into, and its bytes there. Many transfers move one box.
    let mut known: Vec<(u32, u64)> = vec![(u32::MAX, 0); plan.regions().len()];
    for (i, t) in plan.transfers().iter().enumerate() {
        let id = TransferId::at(i);
        check_ends(plan, id, t)?;
        let known = &mut known[t.region.index()];
        if t.reduce || t.then_own || *known != (t.tensor, t.bytes) {
            check_box(plan, id, t, &wholes[t.tensor as usize])?;
            *known = (t.tensor, t.bytes);
        }
        check_after(plan, id, t, &mut named_by)?;
    }
    Ok(())
}

fn check_ends(plan: &Plan, transfer: TransferId, t: &Transfer) -> Result<(), VerifyError> {
    let (devices, tensors) = (plan.problem.topology.num_ranks(), plan.problem.reshards.len());
    if t.tensor as usize >= tensors {
        return Err(VerifyError::NoSuchTensor { transfer, tensor: t.tensor, tensors });
    }
    if let Some(rank) = [t.src, t.dst].into_iter().find(|r| r.index() >= devices) {
        return Err(VerifyError::NoSuchRank { transfer, rank, devices });
    }
    if t.src == t.dst {
        let region = plan.region(t).clone();
        return Err(VerifyError::SelfTransfer { transfer, rank: t.src, region });
    }
    Ok(())
}

fn check_box(plan: &Plan, transfer: TransferId, t: &Transfer, whole: &Region) -> Result<(), VerifyError> {
    let (rank, region) = (t.src, plan.region(t));
    if region.num_dims() != whole.num_dims() || !whole.contains(region) {
        let (region, whole) = (region.clone(), whole.clone());
        return Err(VerifyError::OutsideTensor { transfer, rank, region, whole });
    }
    if region.is_empty() {
        return Err(VerifyError::EmptyBox { transfer, rank, region: region.clone() });
    }
    let layout = &plan.problem.reshards[t.tensor as usize].src.layout;
    let bytes = region.volume() * layout.dtype().bytes();
    if bytes != t.bytes {
        let region = region.clone();
        return Err(VerifyError::SizeDiffers { transfer, rank, region, stated: t.bytes, bytes });
    }
    if (t.reduce || t.then_own) && layout.num_contributions() == 1 {
        return Err(VerifyError::CombinesWhole { transfer, rank: t.dst, region: region.clone() });
    }
    Ok(())
}

fn check_after(
    plan: &Plan,
    transfer: TransferId,
    t: &Transfer,
    named_by: &mut [u32],
) -> Result<(), VerifyError> {
    for &after in plan.after(t) {
        let by = named_by.get_mut(after.index()).ok_or(VerifyError::NoSuchTransfer { transfer, after })?;
        if std::mem::replace(by, transfer.0) == transfer.0 {
            return Err(VerifyError::AfterTwice { transfer, after });
        }
    }
    Ok(())
}
