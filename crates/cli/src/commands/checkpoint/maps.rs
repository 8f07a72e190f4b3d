//! `crossmesh checkpoint maps`: the maps of names that come along.

use anyhow::{Result, anyhow};
use crossmesh_checkpoint::NameMap;
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, FormatArgs, Table};

/// List the maps of names that come along, or print one: what a map of your own extends, or begins with.
#[derive(Debug, clap::Args)]
#[command(after_help = "A map of your own that begins with `extends = \"llama\"` says only in what it
differs.

Examples:
  crossmesh checkpoint maps
  crossmesh checkpoint maps llama > mine.toml")]
pub struct MapsArgs {
    /// A family of models
    #[arg(value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Serialize)]
struct Maps {
    schema: &'static str,
    maps: Vec<Map>,
}

#[derive(Debug, Serialize)]
struct Map {
    family: String,
    /// Of config.json.
    model_types: Vec<String>,
    /// Whose names it has.
    sides: Vec<String>,
}

pub fn run(args: &MapsArgs) -> Result<Answer> {
    match (&args.name, args.format.get()) {
        (None, Format::Json) => {
            output::print_json(&Maps { schema: "crossmesh.checkpoint-maps/1", maps: all()? })?;
        }
        (None, Format::Text) => {
            let mut table = Table::new("lll");
            table.row(["map", "sides", "model types"]);
            for map in all()? {
                table.row([map.family, map.sides.join(", "), map.model_types.join(", ")]);
            }
            output::print(&table.render(0))?;
        }
        (Some(name), format) => {
            let known = NameMap::families().collect::<Vec<_>>().join(", ");
            let text = NameMap::text(name)
                .ok_or_else(|| anyhow!("no map called `{name}` comes along\nhint: one of {known}"))?;
            match format {
                Format::Text => output::print(text)?,
                Format::Json => output::print_json(&toml::from_str::<toml::Table>(text)?)?,
            }
        }
    }
    Ok(Answer::Yes)
}

fn all() -> Result<Vec<Map>> {
    let one = |family| {
        let map = NameMap::built_in(family)?;
        let sides = map.sides().map(String::from).collect();
        Ok(Map { family: map.family, model_types: map.model_types, sides })
    };
    NameMap::families().map(one).collect()
}
