//! Ids are types, counts are numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as an index into a dense table.
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// The id of a place in a dense table. Tables are bounded by `u32` when they are built.
            pub fn at(index: usize) -> Self {
                Self(u32::try_from(index).expect("dense tables hold fewer than 2^32 entries"))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A device and the process that drives it; global and dense over the cluster.
    Rank, "r"
);
id!(
    /// A machine: devices that share memory and NICs.
    HostId, "h"
);
id!(
    /// A NIC, or the share of a host's NICs that a group of its devices uses; dense over the cluster.
    PortId, "p"
);
id!(
    /// A transfer's place in its plan.
    TransferId, "t"
);
id!(
    /// A box's place in its plan's table of regions.
    RegionId, "box"
);
id!(
    /// A virtual stage of a pipeline: a slice of the model, counted in model order.
    StageId, "stage "
);
id!(
    /// A microbatch of a training step.
    MicrobatchId, "microbatch "
);
id!(
    /// A device of a pipeline: a row of the schedule. Behind it may stand a whole mesh of ranks.
    DeviceId, "device "
);
