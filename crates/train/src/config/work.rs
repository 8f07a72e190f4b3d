//! What the units of a model compute and weigh, for cutting it into stages and for predictions: multiplications and additions of matrix products,
//! convolutions and attention; all else is small beside them.

use crate::chain::{Model, Setup};
use crate::graph::Cost;
use crate::kernels::cpu::Cpu;
use crate::parameter::Parameters;
use crate::stage::Recompute;
use crate::stage_rank::StageRank;

/// Operations of a unit for one sample, and its weights.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct UnitWork {
    /// Products with weights: as many again in B, and in W.
    pub matrix: f64,
    /// Products of activations with each other: twice as many in B, none in W.
    pub attention: f64,
    pub parameters: u64,
}

impl UnitWork {
    /// Operations of F, B and W.
    pub fn passes(&self, recompute: Recompute) -> [f64; 3] {
        let forward = self.matrix + self.attention;
        let again = match recompute {
            // What is computed again to stay within a limit is known when that is shared out.
            Recompute::Nothing | Recompute::Within(_) => 0.0,
            Recompute::Attention => self.attention,
            Recompute::Everything => forward,
        };
        [forward, self.matrix + 2.0 * self.attention + again, self.matrix]
    }
}

/// By unit, from the ops that it consists of.
pub fn unit_work(model: &super::resolve::AnyModel) -> Vec<UnitWork> {
    let model: &dyn Model<Cpu<f32>> = match model {
        super::resolve::AnyModel::Gpt(gpt) => gpt,
        super::resolve::AnyModel::Unet(unet) => unet,
    };
    let (place, setup) = (StageRank::alone(), Setup::alone(1, 0));
    let work = |unit: usize| {
        let mut parameters = Parameters::new::<f32>(&place);
        let Cost { matrix, attention } = model.unit(unit, &setup, &mut parameters).cost();
        UnitWork { matrix, attention, parameters: parameters.end() as u64 }
    };
    (0..model.num_units()).map(work).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::resolve::AnyModel;
    use crate::models::gpt::{Gpt, GptConfig};
    use crate::models::unet::{Unet, UnetConfig};

    #[test]
    fn a_gpt_weighs_what_the_formulas_say() {
        let config = GptConfig::new(100, 16, 24, 3, 4);
        let work = unit_work(&AnyModel::Gpt(Gpt::new(config).unwrap()));
        assert_eq!(work.len(), 5);
        // GPT-2's block: 12 d² and 13 d.
        assert_eq!(work[1].parameters, 12 * 24 * 24 + 13 * 24);
        assert_eq!(work[0].parameters, 100 * 24 + 16 * 24);
        assert_eq!(work[0].matrix, 16.0 * 24.0);
        assert_eq!(work[1].matrix, 2.0 * 16.0 * 12.0 * 24.0 * 24.0);
        // Scores and their sums of values, for the half of the pairs that is not masked.
        assert_eq!(work[1].attention, 2.0 * 16.0 * 16.0 * 24.0);
        assert_eq!((work[4].matrix, work[4].attention), (2.0 * 16.0 * 24.0 * 100.0, 0.0));
        let [f, b, w] = work[1].passes(Recompute::Nothing);
        assert!(f < b && w < f);
        assert_eq!(work[1].passes(Recompute::Everything)[1], b + f);
    }

    #[test]
    fn most_of_a_u_transformer_is_where_images_are_large() {
        let config = UnetConfig { groups: 8, heads: 4, ..UnetConfig::new(16, 32) };
        let work = unit_work(&AnyModel::Unet(Unet::new(config).unwrap()));
        assert!(work.iter().all(|w| w.matrix > 0.0 && w.parameters > 0), "{work:?}");
        assert_eq!(
            work.iter().filter(|w| w.attention > 0.0).count(),
            3 + 1 + 6,
            "three levels down, the middle, and up"
        );
    }
}
