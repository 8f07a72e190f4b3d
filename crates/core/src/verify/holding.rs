//! A plan's own law: a rank sends what it holds from the start, or what a transfer named in `after` brought it.

use crate::id::TransferId;
use crate::region::Region;
use crate::reshard::Plan;
use crate::reshard::shards::AllSides;

use super::error::VerifyError;
use super::tiling::uncovered;

/// Every sender holds what it sends: from the start, or by transfers named in `after`.
pub fn check_senders(plan: &Plan, sides: &AllSides) -> Result<(), VerifyError> {
    for (i, t) in plan.transfers().iter().enumerate() {
        if t.then_own && !sides.tensor(t.tensor).src.contains(t.dst, plan.region(t)) {
            let (transfer, region) = (TransferId::at(i), plan.region(t).clone());
            return Err(VerifyError::NoOwnPart { transfer, rank: t.dst, region });
        }
        let brought = plan.after(t).iter().map(|a| &plan.transfers()[a.index()]);
        let mut brought = brought.filter(|a| a.dst == t.src && a.tensor == t.tensor);
        if brought.clone().any(|b| b.region == t.region) {
            continue; // the usual forwarding, seen without a look at the box
        }
        let (region, shards) = (plan.region(t), &sides.tensor(t.tensor).src);
        if shards.contains(t.src, region) || brought.clone().any(|b| plan.region(b).contains(region)) {
            continue;
        }
        let brought = brought.by_ref().map(|b| plan.region(b));
        let own = if shards.is_partial() { vec![] } else { shards.common(t.src, region) };
        let held = own.iter().chain(brought).map(Region::spans);
        if let Some(lacking) = uncovered(region, held).into_iter().next() {
            let (transfer, region) = (TransferId::at(i), region.clone());
            return Err(VerifyError::NotHeld { transfer, rank: t.src, region, lacking });
        }
    }
    Ok(())
}
