use super::language::{Language, LanguageSpec};
use super::*;
use crate::kernels::cpu::Cpu;
use crate::models::gpt::{Gpt, GptConfig};

fn language() -> Language {
    Language::new(LanguageSpec { vocab: 64, groups: 1, branching: 4, seed: 0 }, 16).unwrap()
}

fn refused(config: GptConfig) -> String {
    check_model::<Cpu<f32>>(&language(), &Gpt::new(config).unwrap()).unwrap_err().to_string()
}

#[test]
fn a_model_finds_what_it_reads() {
    let fits = Gpt::new(GptConfig::new(64, 16, 8, 1, 2)).unwrap();
    check_model::<Cpu<f32>>(&language(), &fits).unwrap();
    let larger = Gpt::new(GptConfig::new(100, 16, 8, 1, 2)).unwrap();
    check_model::<Cpu<f32>>(&language(), &larger).unwrap();
}

#[test]
fn a_model_that_does_not_fit_is_told_why() {
    let short = refused(GptConfig::new(63, 16, 8, 1, 2));
    assert!(short.contains("ids up to 63 on `tokens`, and the model's vocabulary ends at 62"), "{short}");
    let long = refused(GptConfig::new(64, 17, 8, 1, 2));
    assert!(long.contains("gives `tokens` as ids[16], and the model wants ids[17]"), "{long}");
    let image = Tensor { name: "image".into(), shape: Shape::Samples(vec![4, 4, 1]), role: Role::Data };
    let missing = check(&language(), &[image]).unwrap_err().to_string();
    assert!(missing.contains("has no port `image`; it has tokens, targets"), "{missing}");
    let real = Tensor { name: "tokens".into(), shape: Shape::Samples(vec![16]), role: Role::Data };
    let kind = check(&language(), &[real]).unwrap_err().to_string();
    assert!(kind.contains("as ids[16], and the model wants numbers[16]"), "{kind}");
    let asked = language().read("image", 0..1, Split::Training).unwrap_err().to_string();
    assert!(asked.contains("no port `image`"), "{asked}");
}
