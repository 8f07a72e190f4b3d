//! A stage made of units, one behind the other.
//!
//! A model is a list of [`Unit`]s (a transformer block, say) through which named tensors flow. A [`Chain`] is some of them in a row, and is a
//! [`Stage`](crate::stage::Stage): it takes from outside what its units need and do not make themselves, hands over what later units will need,
//! keeps what every unit has to remember of a microbatch, and runs units again where it was told to remember less.
//!
//! ```text
//!   stage 0                    stage 1
//!   embed -> block -> block => block -> block -> head
//!                       h ------> h              loss
//! ```

mod flow;
mod halves;
mod held;
mod lists;
mod outline;
mod passes;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::mesh::Mesh;

pub use self::flow::{Flow, Interface, Shape, Tensor};
use self::held::Held;
pub use self::lists::{Between, Listed, Nothing, Pace, PassLists};
use self::outline::Parts;
pub use self::outline::{Limits, Outline, Setup, UnitWork, parameters, unit_work};
use crate::graph::Unit;
use crate::group::Group;
use crate::kernels::Kernels;
use crate::models::ConfigError;
use crate::parameter::Parameters;
use crate::stage::{Live, MicrobatchId};
use crate::strands::Turn;
use crate::tier::Tier;

/// A model: units in order.
pub trait Model<K: Kernels> {
    fn num_units(&self) -> usize;
    /// The mesh of a stage, with the axes by which the model's layers share out their weights.
    fn mesh(&self, mesh: &Mesh) -> Mesh {
        mesh.clone()
    }
    /// Whether the model can be set up so.
    fn check(&self, _setup: &Setup) -> Result<(), ConfigError> {
        Ok(())
    }
    /// What a unit needs and makes; known without making it.
    fn interface(&self, unit: usize) -> Interface;
    /// What the names of a unit's weights begin with, where it is one of several that are equal but for that: they hold, compute and weigh the same. They share no
    /// weights with others.
    fn repeated(&self, _unit: usize) -> Option<String> {
        None
    }
    /// Makes a unit, declaring its weights.
    fn unit(&self, unit: usize, setup: &Setup, parameters: &mut Parameters<'_>) -> Unit<K>;
}

/// Half of a stage's microbatches, and its turns with the other half.
type Strand<K> = (Chain<K>, Turn);

/// What a strand is made with: the ranks along tp, as it speaks to them, and its turns.
pub type StrandGroup<K> = (Arc<dyn Group<<K as Kernels>::Buf>>, Turn);

/// A stage of units.
pub struct Chain<K: Kernels> {
    kernels: Arc<K>,
    /// The ranks along every axis of [`Setup::team`].
    groups: Vec<Arc<dyn Group<K::Buf>>>,
    /// Where what units keep from F to B waits, if not in memory.
    tier: Option<Arc<Tier>>,
    /// Its two halves, where they take turns.
    strands: Option<Box<[Strand<K>; 2]>>,
    setup: Setup,
    parts: Parts<K>,
    held: BTreeMap<MicrobatchId, Held<K::Buf>>,
    live: Live,
}

impl<K: Kernels> Chain<K> {
    /// The units `range` of a model, on one rank.
    pub fn new(
        model: &dyn Model<K>,
        range: Range<usize>,
        kernels: Arc<K>,
        tp: Arc<dyn Group<K::Buf>>,
        setup: Setup,
    ) -> Result<Self, ConfigError> {
        assert_eq!(tp.size(), setup.place.tp().size, "ranks along tp");
        let parts = Parts::new(model, range, &setup)?;
        let (groups, held, live) = (vec![tp], BTreeMap::new(), Live::default());
        Ok(Self { kernels, groups, tier: None, strands: None, parts, setup, held, live })
    }

    /// Half of every microbatch runs in each of two strands, with these groups, which pass the baton on.
    pub fn in_strands(
        mut self,
        model: &dyn Model<K>,
        range: Range<usize>,
        strands: [StrandGroup<K>; 2],
    ) -> Result<Self, ConfigError> {
        let setup = self.setup.strand()?;
        let [first, second] = strands.map(|(group, turn)| {
            let chain = Self::new(model, range.clone(), Arc::clone(&self.kernels), group, setup.clone())?;
            Ok::<_, ConfigError>((Self { tier: self.tier.clone(), ..chain }, turn))
        });
        self.strands = Some(Box::new([first?, second?]));
        Ok(self)
    }

    /// What units keep of a microbatch from F to B waits in a file.
    pub fn offloaded_to(self, tier: Arc<Tier>) -> Self {
        Self { tier: Some(tier), ..self }
    }
}
