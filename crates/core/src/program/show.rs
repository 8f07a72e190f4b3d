//! A program as text, a line an op.

use std::fmt;

use super::{Buffer, Dep, DepKind, Holds, Op, OpKind, Program, RankProgram, Role, Tile, TileId};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, t) in self.tensors.iter().enumerate() {
            let shape = t.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            write!(f, "tensor {i}  {}[{shape}]", t.dtype)?;
            if let Some(parts) = t.partial {
                write!(f, "  the {} of {} parts", parts.op, parts.count)?;
            }
            match &*t.name {
                "" => writeln!(f)?,
                name => writeln!(f, "  {name}")?,
            }
        }
        for (rank, ranked) in self.ranks.iter().enumerate().filter(|(_, r)| !r.is_idle()) {
            writeln!(f, "r{rank}")?;
            self.show_rank(f, ranked)?;
        }
        Ok(())
    }
}

impl Program {
    fn show_rank(&self, f: &mut fmt::Formatter<'_>, ranked: &RankProgram) -> fmt::Result {
        for (i, buffer) in ranked.buffers.iter().enumerate() {
            writeln!(f, "  buffer {i}  {} B  {}", buffer.bytes, role(buffer))?;
        }
        for (i, tile) in ranked.tiles.iter().enumerate() {
            writeln!(f, "  tile {i}  {}", self.tile_line(tile))?;
        }
        for (i, op) in ranked.ops.iter().enumerate() {
            writeln!(f, "  op {i}  {}{}", self.op_line(ranked, op), waits(ranked.deps(op)))?;
        }
        Ok(())
    }

    fn tile_line(&self, tile: &Tile) -> String {
        let mut line = format!(
            "tensor {} {} in buffer {} at {}",
            tile.tensor, self.boxes[tile.region], tile.buffer, tile.offset
        );
        if let Some(strides) = &tile.strides {
            line += &format!(" by {}", strides.iter().map(u64::to_string).collect::<Vec<_>>().join(","));
        }
        match tile.holds {
            Holds::Transit => line,
            Holds::Source(part) => format!("{line}, a source (part {part})"),
            Holds::Goal => format!("{line}, a goal"),
            Holds::Made(part) => format!("{line}, made by a pass (part {part})"),
        }
    }

    fn op_line(&self, ranked: &RankProgram, op: &Op) -> String {
        let what = || match op.bytes {
            0 => "a word".to_string(),
            bytes => format!("{} ({bytes} B)", self.boxes[op.region]),
        };
        let place = |tile: TileId| match tile {
            TileId::NOWHERE => String::new(),
            tile => format!(" tile {}", tile.0),
        };
        match op.kind {
            OpKind::Send { to, lane, tag, from, .. } => {
                format!("send t{tag} to {to}, lane {lane}: {} from{}", what(), place(from))
            }
            OpKind::Recv { from, lane, tag, into, reduce } => {
                let into = format!("{}{}", if reduce { "added to" } else { "into" }, place(into));
                format!("recv t{tag} from {from}, lane {lane}: {} {into}", what())
            }
            OpKind::Copy { from, into, reduce } => {
                let into = format!("{}{}", if reduce { "added to" } else { "into" }, place(into));
                format!("copy {} from{} {into}", what(), place(from))
            }
            OpKind::Compute { pass, nanos, needs, makes } => {
                let list =
                    |tiles: &[TileId]| tiles.iter().map(|t| t.0.to_string()).collect::<Vec<_>>().join(" ");
                let (needs, makes) = (list(ranked.touched(needs)), list(ranked.touched(makes)));
                format!("pass {pass}, {nanos} ns: reads tiles [{needs}], writes tiles [{makes}]")
            }
        }
    }
}

fn role(buffer: &Buffer) -> String {
    match buffer.role {
        Role::Source(tensor) => format!("source of tensor {tensor}"),
        Role::Destination(tensor) => format!("destination of tensor {tensor}"),
        Role::InPlace(tensor) => format!("source and destination of tensor {tensor}"),
        Role::Crossing => "what crosses".into(),
        Role::Staging => "staging".into(),
    }
}

fn waits(deps: &[Dep]) -> String {
    let one = |dep: &Dep| match dep.kind {
        DepKind::Done => dep.op.to_string(),
        DepKind::Stream => format!("~{}", dep.op),
    };
    match deps.is_empty() {
        true => String::new(),
        false => format!("  after {}", deps.iter().map(one).collect::<Vec<_>>().join(" ")),
    }
}
