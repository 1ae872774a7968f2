//! The results as a page of the book and as an HTML page.
//!
//! Owns words and layout. Never measures or judges.

use std::fmt::Write as _;

use crate::plot::{Plot, escape};
use crate::plots;
use crate::results::{Ratio, Results, digits};

/// What the pages show.
pub(crate) struct Whole<'a> {
    pub(crate) results: &'a Results,
    /// Of a run inside the guest, beside rxe.
    pub(crate) guest: Option<&'a Results>,
}

const POINTS: [(&str, &str); 7] = [
    ("1", "WRITE of 1 MiB over raw Ethernet, content verified"),
    ("2", "The same over the unprivileged UDP socket, as uid nobody"),
    ("3", "In one process, two threads"),
    ("4", "8-byte ping-pong (round trips)"),
    ("5", "64-byte WRITEs, one QP, deep queue"),
    ("6", "In the guest, beside rxe"),
    ("7", "Connections"),
];

impl Whole<'_> {
    fn ratios(&self) -> impl Iterator<Item = &Ratio> {
        self.results.ratios.iter().chain(self.guest.into_iter().flat_map(|g| &g.ratios))
    }

    /// What both ran on.
    fn machine(&self) -> impl Iterator<Item = (&String, &String)> {
        self.results.machine.iter().chain(self.guest.into_iter().flat_map(|g| &g.machine))
    }
}

fn answer(ratio: &Ratio) -> &'static str {
    match (ratio.holds, ratio.bound.is_empty()) {
        (Some(true), _) => "yes",
        (Some(false), _) => "**no**",
        (None, true) => "",
        (None, false) => "not measured",
    }
}

fn measured(ratio: &Ratio) -> String {
    ratio.measured.map_or_else(|| "-".into(), |m| format!("{m:.2}"))
}

/// For the terminal.
pub(crate) fn verdict(whole: &Whole<'_>) -> String {
    let mut out = String::new();
    for r in whole.ratios() {
        let answer = answer(r).trim_matches('*');
        let _ =
            writeln!(out, "{:>2}  {:<78} {:>8} {:>8}  {answer:<4} {}", r.point, r.what, r.bound, measured(r), r.from);
    }
    let bounded: Vec<_> = whole.ratios().filter(|r| r.holds.is_some()).collect();
    let held = bounded.iter().filter(|r| r.holds == Some(true)).count();
    let _ = write!(out, "{held} of {} bounds hold", bounded.len());
    out
}

/// The page of the book.
pub(crate) fn markdown(whole: &Whole<'_>) -> String {
    let results = whole.results;
    let mut out = String::from(INTRODUCTION);
    let _ = writeln!(
        out,
        "\nMedians of {} rounds, all contestants in turn in each; the run took {:.0} s.\n\n| machine | |\n|---|---|",
        results.rounds, results.seconds
    );
    for (name, value) in whole.machine() {
        let _ = writeln!(out, "| {name} | {value} |");
    }
    let _ =
        writeln!(out, "\n## Ratios\n\n| point | ratio | bound | measured | holds | from |\n|---|---|---|---|---|---|");
    for r in whole.ratios() {
        let _ =
            writeln!(out, "| {} | {} | {} | {} | {} | {} |", r.point, r.what, r.bound, measured(r), answer(r), r.from);
    }
    for (heading, figures) in tables(results, whole.guest) {
        let _ = writeln!(out, "\n## {heading}\n\n{figures}");
    }
    if !results.notes.is_empty() {
        let _ = writeln!(out, "\n## Notes\n");
        for note in &results.notes {
            let _ = writeln!(out, "- {note}");
        }
    }
    out
}

const INTRODUCTION: &str = "# Side by side

uroce beside what one would use instead, on one veth pair in one run: `benches/versus/run.sh` installs what it needs, makes
two network namespaces, runs everything in turn, and writes this page, [the plots](../versus/versus.html) and
[the figures](../versus/results.json). Servers run on processor 0, clients on processor 1. The content of uroce's messages is
checked (`uroce perf --verify`). \"raw\" is the same device driven by a program without any protocol: no ICRC, no
memory region, headers alone looked at. Latencies are whole round trips. UDP runs as uid nobody without capabilities.
A TCP connection is closed by a reset, which is quicker than the orderly way. `bound` is what was set out to be reached;
rows without one are only reported. See [Performance](performance.md) for where the time goes, and [an emulated
guest](profile-guest.md) for what is measured beside rxe.
";

/// The figures behind the ratios, a table for each kind.
fn tables(results: &Results, guest: Option<&Results>) -> Vec<(&'static str, String)> {
    let mut out = vec![
        (
            "Bandwidth, messages of 1 MiB",
            table(results, &[("gbits", "Gbit/s")], |id| !id.starts_with("plot/") && id != "floor"),
        ),
        (
            "In memory alone",
            table(
                results,
                &[
                    ("copy_crc_gbits", "copy with CRC, Gbit/s"),
                    ("crc_copy_gbits", "CRC, then copy"),
                    ("copy_crc_across_gbits", "copy with CRC, between two threads"),
                    ("crc_copy_across_gbits", "CRC, then copy, between two threads"),
                ],
                |id| id == "floor",
            ),
        ),
        (
            "Round trips, 8 bytes",
            table(
                results,
                &[("p50_us", "p50, us"), ("p90_us", "p90"), ("p99_us", "p99"), ("p999_us", "p99.9")],
                |id| id.contains("lat") || id.contains("ping"),
            ),
        ),
        (
            "Rates, 64 bytes",
            table(results, &[("messages_s", "messages/s"), ("packets_s", "packets/s")], |id| id.ends_with("rate")),
        ),
        (
            "Connections",
            table(
                results,
                &[
                    ("connections_s", "connections/s"),
                    ("cycles_s", "with all other steps"),
                    ("p50_us", "p50, us"),
                    ("p99_us", "p99"),
                    ("p999_us", "p99.9"),
                ],
                |id| id.contains("connect"),
            ),
        ),
    ];
    if let Some(guest) = guest {
        let metrics = [("gbits", "Gbit/s"), ("p50_us", "p50, us"), ("connections_s", "connections/s")];
        out.push(("In the guest", table(guest, &metrics, |_| true)));
    }
    out.retain(|(_, table)| !table.is_empty());
    out
}

fn table(results: &Results, metrics: &[(&str, &str)], wanted: impl Fn(&str) -> bool) -> String {
    let shown = |id: &str, figure: &crate::results::Figure| {
        wanted(id) && !id.starts_with("plot/") && metrics.iter().any(|(m, _)| figure.metrics.contains_key(*m))
    };
    let rows: Vec<_> = results.figures.iter().filter(|(id, figure)| shown(id, figure)).collect();
    if rows.is_empty() {
        return String::new();
    }
    let used: Vec<_> = metrics.iter().filter(|(m, _)| rows.iter().any(|(_, f)| f.metrics.contains_key(*m))).collect();
    let mut out = format!(
        "| |{}\n|---|{}\n",
        used.iter().map(|(_, t)| format!(" {t} |")).collect::<String>(),
        "---:|".repeat(used.len())
    );
    for (id, figure) in rows {
        let values =
            used.iter().map(|(m, _)| results.get(id, m).map_or_else(|| " |".into(), |v| format!(" {} |", digits(v))));
        let _ = writeln!(out, "| {} |{}", figure.title, values.collect::<String>());
    }
    out.trim_end().to_owned()
}

/// The page with the plots: no script, nothing fetched.
pub(crate) fn html(whole: &Whole<'_>) -> String {
    let results = whole.results;
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>uroce side by side</title><style>{STYLE}</style></head><body>\n<h1>uroce side by side</h1>\n"
    );
    let _ = writeln!(
        out,
        "<p>Medians of {} rounds; written by <code>benches/versus</code>. Latencies are whole round trips.</p>",
        results.rounds
    );
    let rows = whole.machine().map(|(n, v)| format!("<tr><td>{}</td><td>{}</td></tr>", escape(n), escape(v)));
    let _ = writeln!(out, "<table>{}</table>", rows.collect::<String>());
    for (heading, plots) in plots::all(results) {
        let _ = writeln!(out, "<h2>{heading}</h2>");
        out.extend(plots.iter().map(Plot::svg));
    }
    out.push_str("<h2>Ratios</h2>\n");
    for (point, title) in POINTS.iter().chain(&[("9", "An idle endpoint")]) {
        let rows: Vec<&Ratio> = whole.ratios().filter(|r| r.point == *point).collect();
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "<h3>{point}. {}</h3><table class=\"r\"><tr><th>ratio</th><th>bound</th><th>measured</th><th>holds</th><th>from</th></tr>",
            escape(title)
        );
        for r in rows {
            let answer = answer(r).trim_matches('*');
            let _ = writeln!(
                out,
                "<tr class=\"{}\"><td>{}</td><td>{}</td><td>{}</td><td>{answer}</td><td>{}</td></tr>",
                answer.replace(' ', "-"),
                escape(&r.what),
                escape(&r.bound),
                measured(r),
                escape(&r.from)
            );
        }
        out.push_str("</table>\n");
    }
    out.push_str("</body></html>\n");
    out
}

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;color:#111;background:#fff}\
table{border-collapse:collapse;margin:.6em 0 1.4em}td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left;vertical-align:top}\
.r td+td{white-space:nowrap}tr.yes td:nth-child(4){background:#d9f2e3}tr.no td:nth-child(4){background:#f9d9d0}\
svg{width:100%;height:auto;margin:1em 0;font:12px system-ui,sans-serif}.t{font-size:15px;font-weight:600}.g{stroke:#ddd}\
.p{fill:none;stroke-width:2}.n{text-anchor:end}.l{text-anchor:middle}.k{text-anchor:start}";
