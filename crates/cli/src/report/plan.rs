//! The report of one plan: figures, the traffic matrix, NIC timelines, transfers.

use std::fmt::Write as _;

use crossmesh_core::reshard::Plan;
use crossmesh_core::units::{Bytes, Rate, Seconds};
use serde_json::{Value, json};

use crate::output::count;
use crate::path;
use crate::predict::Prediction;
use crate::summary;
use crate::tensors;

use super::{Page, card, escape, matrix, timeline};

/// The first so many transfers are listed.
const LISTED: usize = 200;
/// The first so many tensors.
const LISTED_TENSORS: usize = 20;

/// The page. `provenance` is the footer: command and version.
pub fn render(prediction: &Prediction, provenance: Vec<String>) -> String {
    let plan = &prediction.plan;
    let mut body = figures(prediction);
    if let Some(assumed) = &prediction.assumed {
        let _ = writeln!(body, "<p class=\"note\">Note: {}.</p>", escape(assumed));
    }
    body += &why(prediction);
    body += &tensors(prediction);
    body += &section(
        "Traffic between hosts",
        "Bytes from a sending host (row) to a receiving host (column); the stronger the colour, the more. What moves inside a host is \
         amber.",
        &matrix::render(&summary::host_traffic(plan)),
    );
    body += &timelines(prediction);
    body += &critical_path(prediction);
    body += &transfers(plan);
    let title = match plan.problem.reshards.as_slice() {
        [one] if one.name.is_empty() => {
            format!("Reshard {}[{}]", one.src.layout.dtype(), numbers(one.src.layout.shape()))
        }
        [one] => format!("Reshard {}", one.name),
        many => format!("Reshard {}", count(many.len(), "tensor")),
    };
    let mut footer = provenance;
    footer.push(config(plan));
    Page { title, subtitle: subtitle(plan), body, data: data(prediction), footer }.render()
}

fn numbers(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

fn subtitle(plan: &Plan) -> String {
    const SHOWN: usize = 3;
    let reshards = &plan.problem.reshards;
    let mut lines: Vec<String> = reshards
        .iter()
        .take(SHOWN)
        .map(|r| {
            format!(
                "<code>{}</code> → <code>{}</code>",
                escape(&r.src.layout.summary()),
                escape(&r.dst.layout.summary())
            )
        })
        .collect();
    if reshards.len() > SHOWN {
        lines.push(format!("and {} more", count(reshards.len() - SHOWN, "tensor")));
    }
    lines.join("<br>")
}

fn config(plan: &Plan) -> String {
    let cluster = &plan.problem.cluster;
    let nic = cluster.hosts.first().map_or(String::new(), |h| {
        format!("{} × {} a host, {} inside", h.nics, Rate(h.nic_out_bytes_per_s), Rate(h.local_bytes_per_s))
    });
    let messages = match cluster.messages_are_free() {
        true => String::new(),
        false => format!(", {} a message at each end", Seconds(cluster.message_s)),
    };
    format!(
        "strategy {}, chunks of {}, {}; {nic}, latency {}",
        plan.strategy,
        Bytes(plan.chunk_bytes),
        summary::place(&plan.problem),
        Seconds(cluster.latency_s)
    ) + &messages
}

fn figures(prediction: &Prediction) -> String {
    let (plan, ratio) = (&prediction.plan, prediction.ratio());
    let near = if ratio <= 1.02 { "good" } else { "" };
    let cards = [
        card(&Seconds(prediction.seconds()).to_string(), "predicted", ""),
        card(&Seconds(prediction.bound.seconds).to_string(), "lower bound", "bound"),
        card(&format!("{ratio:.3} ×"), "of the bound", near),
        card(
            &Bytes(plan.bytes_moved()).to_string(),
            &format!("in {}", count(plan.transfers().len(), "transfer")),
            "",
        ),
        card(&Bytes(prediction.peak_extra_bytes()).to_string(), "peak extra memory a device", ""),
        card(&plan.strategy, &summary::place(&plan.problem), ""),
    ];
    format!("<div class=\"cards\">\n{}</div>\n", cards.concat())
}

fn why(prediction: &Prediction) -> String {
    let mut text = String::new();
    if !prediction.bound.reason.is_empty() {
        let _ =
            writeln!(text, "<p class=\"note\">No plan is faster: {}.</p>", escape(&prediction.bound.reason));
    }
    let reasons = summary::reasons(prediction);
    if !reasons.is_empty() {
        text += "<h2>Why this plan</h2>\n<ul class=\"why\">\n";
        for reason in &reasons {
            let _ = writeln!(text, "<li>{}</li>", escape(reason));
        }
        text += "</ul>\n";
    }
    text
}

/// Who keeps whom waiting.
fn critical_path(prediction: &Prediction) -> String {
    let rows = path::rows(prediction);
    if rows.is_empty() {
        return String::new();
    }
    let (shown, others) = path::longest(&rows);
    let mut table = String::from(
        "<table>\n<tr><th class=\"num\">from</th><th class=\"num\">to</th><th>way</th><th>what</th></tr>\n",
    );
    for row in shown {
        let _ = writeln!(
            table,
            "<tr><td class=\"num\">{}</td><td class=\"num\">{}</td><td>{}</td><td>{}</td></tr>",
            Seconds(row.start_s),
            Seconds(row.end_s),
            escape(&row.way()),
            row.what()
        );
    }
    table += "</table>\n";
    let others = others.map_or(String::new(), |line| format!(" The longest parts; {line}."));
    let note = format!("What the predicted time is made of: each part waited for the one above it.{others}");
    section("Critical path", &note, &table)
}

fn section(title: &str, note: &str, content: &str) -> String {
    format!("<h2>{title}</h2>\n<p class=\"note\">{note}</p>\n<div class=\"panel\">\n{content}</div>\n")
}

fn timelines(prediction: &Prediction) -> String {
    let tiers = match prediction.plan.problem.cluster.tiers.is_empty() {
        true => "",
        false => ", and of <span style=\"color:var(--tier)\">uplinks</span>",
    };
    let note = format!(
        "The share of each NIC's rate in use, as height: <span style=\"color:var(--out)\">out</span> and \
         <span style=\"color:var(--in)\">in</span>{tiers}. The dashed line is the lower bound, the solid one the predicted \
         end. Where links are many, the NICs of a host are one row, and at most {} rows are shown.",
        timeline::MAX_ROWS
    );
    section("NICs over time", &note, &timeline::render(prediction))
}

/// Which tensor takes longest: the largest first.
fn tensors(prediction: &Prediction) -> String {
    let (rows, busiest) = tensors::rows(prediction);
    if rows.len() == 1 {
        return String::new();
    }
    let mut table = format!(
        "<table>\n<tr><th>tensor</th><th class=\"num\">bytes</th><th class=\"num\">transfers</th>\
         <th class=\"num\">under way</th><th class=\"num\">of {}</th></tr>\n",
        escape(&busiest)
    );
    let slowest = tensors::slowest(&rows);
    for row in tensors::shown(&rows, LISTED_TENSORS) {
        let best = if slowest.is_some_and(|slowest| std::ptr::eq(slowest, row)) { " best" } else { "" };
        let _ = writeln!(
            table,
            "<tr title=\"{} → {}\"><td>{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num{best}\">{}</td>\
             <td class=\"num\">{:.1} %</td></tr>",
            escape(&row.src),
            escape(&row.dst),
            escape(&row.name),
            Bytes(row.bytes),
            row.transfers,
            Seconds(row.seconds()),
            100.0 * row.share_of_busiest_link
        );
    }
    table += "</table>\n";
    let more = match rows.len() > LISTED_TENSORS {
        true => format!(" The first {LISTED_TENSORS} of {}, and the one that takes longest.", rows.len()),
        false => String::new(),
    };
    let slowest = tensors::slowest_in_words(&rows)
        .map_or(String::new(), |words| format!(" <b>{}.</b>", escape(&words)));
    let note = format!(
        "The largest first. Tensors travel side by side; the last column is what each takes of the busiest link.{more}{slowest}"
    );
    section("Tensors", &note, &table)
}

fn transfers(plan: &Plan) -> String {
    let all = plan.transfers();
    if all.is_empty() {
        return String::new();
    }
    let mut table = String::from(
        "<table>\n<tr><th>id</th><th>from</th><th>to</th><th>box</th><th class=\"num\">bytes</th><th>link</th>\
         <th>after</th></tr>\n",
    );
    for (id, t) in all.iter().take(LISTED).enumerate() {
        let after: Vec<String> = plan.after(t).iter().map(|a| a.to_string()).collect();
        let link = if plan.crosses_hosts(t) { "nic" } else { "local" };
        let _ = writeln!(
            table,
            "<tr><td>t{id}</td><td>{} <span class=\"over\">{}</span></td><td>{} <span class=\"over\">{}</span></td>\
             <td class=\"mono\">{}</td><td class=\"num\">{}</td><td>{link}{}</td><td>{}</td></tr>",
            t.src,
            plan.problem.topology.host(t.src),
            t.dst,
            plan.problem.topology.host(t.dst),
            plan.region(t),
            Bytes(t.bytes),
            if t.reduce { ", adds up" } else { "" },
            after.join(" ")
        );
    }
    table += "</table>\n";
    let note = match all.len() > LISTED {
        true => format!("The first {LISTED} of {}.", all.len()),
        false => "Every transfer, in the order of the plan.".to_string(),
    };
    section("Transfers", &note, &table)
}

/// The figures behind the pictures. Timelines of large plans stay out: the trace is the place for them.
fn data(prediction: &Prediction) -> Value {
    const MAX_BUSY: usize = 400;
    let plan = &prediction.plan;
    let traffic: Vec<Value> = summary::host_traffic(plan)
        .into_iter()
        .map(|((from, to), t)| json!({ "from": from.0, "to": to.0, "bytes": t.bytes, "transfers": t.transfers }))
        .collect();
    let links: Vec<Value> = timeline::rows(prediction)
        .into_iter()
        .map(|l| {
            let busy: Vec<[f64; 3]> = match l.busy.len() > MAX_BUSY {
                true => vec![],
                false => l.busy.iter().map(|b| [b.start_s, b.end_s, b.share]).collect(),
            };
            json!({ "link": l.name, "bytes": l.bytes, "bytes_per_s": l.bytes_per_s, "busy": busy })
        })
        .collect();
    json!({
        "schema": "crossmesh.report/1",
        "strategy": plan.strategy,
        "assumed": prediction.assumed,
        "predicted_s": prediction.seconds(),
        "lower_bound_s": prediction.bound.seconds,
        "bytes_moved": plan.bytes_moved(),
        "num_transfers": plan.transfers().len(),
        "peak_extra_bytes": prediction.peak_extra_bytes(),
        "tensors": tensors::rows(prediction).0,
        "traffic": traffic,
        "links": links,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::reshard::{PlanOptions, Problem};

    fn report(src: &str, dst: &str) -> (Prediction, String) {
        let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        let prediction = Prediction::of_problem(&problem, &PlanOptions::default()).unwrap();
        let html = render(&prediction, vec!["crossmesh explain …".into()]);
        (prediction, html)
    }

    fn data_of(html: &str) -> Value {
        let data = html.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn pictures_show_what_the_data_says() {
        let (prediction, html) =
            report("i32[64,64,64]@A{host:2,gpu:4}(_,host,_)", "i32[64,64,64]@B{host:2,gpu:4}(host,_,_)");
        let data = data_of(&html);
        assert_eq!(data["predicted_s"], prediction.seconds());
        assert_eq!(data["lower_bound_s"], prediction.bound.seconds);
        assert_eq!(data["num_transfers"], prediction.plan.transfers().len());
        let tensors = data["tensors"].as_array().unwrap();
        assert_eq!(tensors.len(), 1);
        assert_eq!(tensors[0]["transfers"], prediction.plan.transfers().len());
        // Two senders to two receivers over NICs, and two hosts that share inside.
        let traffic = data["traffic"].as_array().unwrap();
        assert_eq!(traffic.iter().filter(|t| t["from"] != t["to"]).count(), 4);
        assert_eq!(html.matches("<rect class=\"out\"").count(), 4);
        assert_eq!(html.matches("<rect class=\"local\"").count(), 2);
        // A NIC out of each sender, a NIC into each receiver; one bound and one end.
        assert_eq!(data["links"].as_array().unwrap().len(), 4);
        assert_eq!(html.matches("<path class=\"out\"").count(), 2);
        assert_eq!(html.matches("<path class=\"in\"").count(), 2);
        assert_eq!(html.matches("class=\"boundline\"").count(), 1);
        assert_eq!(html.matches("class=\"endline\"").count(), 1);
        assert_eq!(html.matches("<tr><td>t").count(), prediction.plan.transfers().len());
        assert!(html.contains("<div>crossmesh explain …</div>"));
    }

    #[test]
    fn nothing_to_move_is_still_a_page() {
        let (_, html) = report("f32[8]@A{tp:2}(tp)", "f32[8]@A{tp:2}(tp)");
        assert!(html.ends_with("</html>\n") && !html.contains("NaN") && !html.contains("inf"));
        assert_eq!(data_of(&html)["bytes_moved"], 0);
    }

    #[test]
    fn long_lists_are_cut() {
        let (prediction, html) = report("f32[64,64]@A{tp:16}(tp,_)", "f32[64,64]@B{tp:16}(_,tp)");
        assert_eq!(prediction.plan.transfers().len(), 256);
        assert_eq!(html.matches("<tr><td>t").count(), LISTED);
        assert!(html.contains("The first 200 of 256."));
    }
}
