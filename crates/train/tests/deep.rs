//! Looking at a job takes no more than its depth: what is asked of a model of many layers is counted.

mod grid;

use std::sync::atomic::{AtomicUsize, Ordering};

use crossmesh_core::mesh::Mesh;
use crossmesh_train::chain::{Interface, Model, Outline, Setup};
use crossmesh_train::graph::Unit;
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::ConfigError;
use crossmesh_train::models::gpt::{Gpt, GptConfig, Residual};
use crossmesh_train::parameter::Parameters;
use crossmesh_train::stage::Recompute;
use crossmesh_train::wiring::{Wiring, setup};
use grid::{Case, Kind, adamw};

/// A model that counts what it is asked.
struct Asked {
    model: Gpt,
    made: AtomicUsize,
    interfaces: AtomicUsize,
    names: AtomicUsize,
}

impl Asked {
    fn inner(&self) -> &dyn Model<Cpu<f32>> {
        &self.model
    }
}

impl Model<Cpu<f32>> for Asked {
    fn num_units(&self) -> usize {
        self.inner().num_units()
    }

    fn mesh(&self, mesh: &Mesh) -> Mesh {
        self.inner().mesh(mesh)
    }

    fn check(&self, setup: &Setup) -> Result<(), ConfigError> {
        self.inner().check(setup)
    }

    fn interface(&self, unit: usize) -> Interface {
        self.interfaces.fetch_add(1, Ordering::Relaxed);
        self.inner().interface(unit)
    }

    fn repeated(&self, unit: usize) -> Option<String> {
        self.names.fetch_add(1, Ordering::Relaxed);
        self.inner().repeated(unit)
    }

    fn unit(&self, unit: usize, setup: &Setup, parameters: &mut Parameters<'_>) -> Unit<Cpu<f32>> {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.inner().unit(unit, setup, parameters)
    }
}

/// Units made, interfaces and names asked for by all that a dry run looks at: the wiring, and every rank's stages.
fn asked(config: GptConfig, schedule: &'static str, recompute: Recompute) -> [usize; 3] {
    let case =
        Case { kind: Kind::Gpt(config.clone()), recompute, ..Case::gpt(schedule, &["A{tp:2}", "B{dp:2}"]) };
    let job = case.job::<f32>(adamw());
    let [made, interfaces, names] = [0; 3].map(AtomicUsize::new);
    let model = Asked { model: Gpt::new(config).unwrap(), made, interfaces, names };
    let wiring = Wiring::new(&model, &job).unwrap();
    for device in job.schedule.placement().devices() {
        for (stage, position) in wiring.stages_on(device).iter().flat_map(|s| [(*s, 0), (*s, 1)]) {
            let units = job.stages[stage.index()].clone();
            let outline = Outline::new(&model, units, &setup(&job, stage, position).unwrap()).unwrap();
            assert!(outline.num_elements() > 0);
        }
    }
    [model.made, model.interfaces, model.names].map(AtomicUsize::into_inner)
}

#[test]
fn a_deep_model_is_looked_at_in_time_that_its_depth_takes() {
    let gpt = |layers| GptConfig { tied: true, ..GptConfig::new(11, 4, 8, layers, 2) };
    let llama = |layers| GptConfig::llama((11, 4), 8, layers, (2, 2), 8);
    let ladder = |layers| GptConfig { residual: Residual::Ladder, ..llama(layers) };
    let families: [&dyn Fn(usize) -> GptConfig; 3] = [&gpt, &llama, &ladder];
    for config in families {
        for (schedule, recompute) in [
            ("1f1b", Recompute::Nothing),
            ("zbv", Recompute::Attention),
            ("1f1b", Recompute::Within(1 << 20)),
        ] {
            let (few, many) = (16, 16 * 25);
            let [made, interfaces, names] = asked(config(few), schedule, recompute);
            let [made_of_many, interfaces_of_many, names_of_many] = asked(config(many), schedule, recompute);
            let what = format!("{:?}, {schedule}, {recompute:?}", config(few));
            assert_eq!(made, made_of_many, "{what}: layers that are alike are made once");
            assert!(interfaces_of_many <= 25 * interfaces, "{what}: {interfaces_of_many} for {interfaces}");
            assert!(names_of_many <= 25 * names, "{what}: {names_of_many} for {names}");
        }
    }
}
