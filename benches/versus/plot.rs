//! Line plots as SVG text.
//!
//! Owns scales, ticks and colours. Never knows what is plotted.

use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 230.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;
/// Told apart by people with any eyes (Okabe and Ito), and repeated with dashes.
const COLOURS: [&str; 8] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8a8a00"];

/// One line.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Place on the x axis (an index into the labels) and value.
    pub(crate) points: Vec<(usize, f64)>,
}

/// A plot with named places on its x axis.
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    pub(crate) labels: Vec<String>,
    pub(crate) lines: Vec<Line>,
    pub(crate) logarithmic: bool,
}

impl Plot {
    /// As an `svg` element; nothing where there is nothing to show.
    pub(crate) fn svg(&self) -> String {
        let values: Vec<f64> =
            self.lines.iter().flat_map(|l| l.points.iter().map(|p| p.1)).filter(|v| *v > 0.0).collect();
        let Some(highest) = values.iter().copied().reduce(f64::max) else { return String::new() };
        let lowest = values.iter().copied().fold(highest, f64::min);
        let scale = Scale::new(lowest, highest, self.logarithmic);
        let mut out = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\"><text class=\"t\" x=\"{LEFT}\" y=\"18\">{0}</text>",
            escape(&self.title)
        );
        self.axes(&scale, &mut out);
        // A line that is missing leaves its colour unused, so that the same name has the same one in the next plot.
        let shown = self.lines.iter().enumerate().filter(|(_, l)| !l.points.is_empty());
        for (row, (index, line)) in shown.enumerate() {
            self.line(index, row, line, &scale, &mut out);
        }
        out.push_str("</svg>\n");
        out
    }

    fn x_of(&self, place: usize) -> f64 {
        let steps = self.labels.len().saturating_sub(1).max(1) as f64;
        LEFT + (WIDTH - LEFT - RIGHT) * place as f64 / steps
    }

    fn axes(&self, scale: &Scale, out: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in &scale.ticks {
            let y = scale.y_of(*tick);
            let _ = write!(
                out,
                "<line class=\"g\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text class=\"n\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                number(*tick)
            );
        }
        for (place, label) in self.labels.iter().enumerate() {
            let _ = write!(
                out,
                "<text class=\"l\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                self.x_of(place),
                bottom + 17.0,
                escape(label)
            );
        }
        let middle = f64::midpoint(LEFT, right);
        let _ = write!(
            out,
            "<text class=\"l\" x=\"{middle:.1}\" y=\"{:.1}\">{}</text><text class=\"l\" transform=\"translate(14 {:.1}) rotate(-90)\">{}</text>",
            HEIGHT - 8.0,
            escape(&self.x),
            HEIGHT / 2.0,
            escape(&self.y)
        );
    }

    fn line(&self, index: usize, row: usize, line: &Line, scale: &Scale, out: &mut String) {
        let colour = COLOURS[index % COLOURS.len()];
        let dash = ["none", "6 3", "2 3"][(index / COLOURS.len()) % 3];
        let style = format!("stroke=\"{colour}\" stroke-dasharray=\"{dash}\"");
        let place = |(place, value): &(usize, f64)| (self.x_of(*place), scale.y_of(*value));
        let points: Vec<(f64, f64)> = line.points.iter().filter(|p| p.1 > 0.0).map(place).collect();
        let path = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
        let _ = write!(out, "<polyline class=\"p\" {style} points=\"{path}\"/>");
        for ((x, y), (_, value)) in points.iter().zip(line.points.iter().filter(|p| p.1 > 0.0)) {
            let name = escape(&line.name);
            let value = crate::results::digits(*value);
            let _ = write!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}: {value}</title></circle>"
            );
        }
        let (x, y) = (WIDTH - RIGHT + 14.0, TOP + 6.0 + 15.0 * row as f64);
        let _ = write!(
            out,
            "<line class=\"p\" {style} x1=\"{x}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text class=\"k\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x + 22.0,
            x + 28.0,
            y + 4.0,
            escape(&line.name)
        );
    }
}

struct Scale {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    logarithmic: bool,
}

impl Scale {
    fn new(lowest: f64, highest: f64, logarithmic: bool) -> Self {
        if logarithmic {
            let (low, high) = (10f64.powf(lowest.log10().floor()), 10f64.powf(highest.log10().ceil()));
            let high = if high > low { high } else { low * 10.0 };
            let decades = (high / low).log10().round() as i32;
            let fine: &[f64] = if decades <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
            let ticks = (0..=decades).flat_map(|d| fine.iter().map(move |f| low * 10f64.powi(d) * f));
            return Self { low, high, ticks: ticks.filter(|t| *t <= high * 1.0001).collect(), logarithmic };
        }
        let magnitude = 10f64.powf((highest / 5.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|s| s * magnitude).find(|s| highest / s <= 6.0);
        let step = step.unwrap_or(highest);
        let count = (1..=10u32).find(|n| step * f64::from(*n) >= highest).unwrap_or(10);
        let ticks = (0..=count).map(|n| step * f64::from(n)).collect();
        Self { low: 0.0, high: step * f64::from(count), ticks, logarithmic }
    }

    fn y_of(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value / self.low).log10() / (self.high / self.low).log10()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }
}

fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// For HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
