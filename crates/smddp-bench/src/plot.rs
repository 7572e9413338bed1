//! Chart of the share of the line rate over the number of nodes, with one line for each series.

use crate::svg::{Anchor, COLOURS, GRID, INK, Svg};

/// One line: its name, and points (nodes, share) in ascending order of nodes.
pub(crate) struct Series {
    pub name: String,
    pub points: Vec<(usize, f64)>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 56.0;

pub(crate) fn chart(title: &str, note: &str, series: &[Series]) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let (width, height) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let mut nodes: Vec<usize> = series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let log = |n: usize| (n.max(1) as f64).log2();
    let (first, last) = (nodes.first().map_or(0.0, |&n| log(n)), nodes.last().map_or(1.0, |&n| log(n)));
    let span = (last - first).max(1e-9);
    let x =
        |n: usize| if nodes.len() < 2 { LEFT + width / 2.0 } else { LEFT + width * (log(n) - first) / span };
    let y = |share: f64| TOP + height * (1.0 - share.clamp(0.0, 1.0));

    svg.text((LEFT, 24.0), 15.0, Anchor::Start, INK, title);
    svg.text((LEFT, 42.0), 11.0, Anchor::Start, INK, note);
    for tenth in (0..=10).step_by(2) {
        let share = f64::from(tenth) / 10.0;
        svg.line((LEFT, y(share)), (LEFT + width, y(share)), GRID, 1.0);
        svg.text((LEFT - 8.0, y(share) + 4.0), 11.0, Anchor::End, INK, &format!("{} %", tenth * 10));
    }
    for &n in &nodes {
        svg.line((x(n), TOP + height), (x(n), TOP + height + 5.0), INK, 1.0);
        svg.text((x(n), TOP + height + 19.0), 11.0, Anchor::Middle, INK, &n.to_string());
    }
    svg.text((LEFT + width / 2.0, HEIGHT - 14.0), 12.0, Anchor::Middle, INK, "nodes");
    svg.line((LEFT, TOP + height), (LEFT + width, TOP + height), INK, 1.0);
    for (i, line) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let points: Vec<(f64, f64)> = line.points.iter().map(|&(n, share)| (x(n), y(share))).collect();
        svg.polyline(&points, colour, 2.0);
        for (&at, &(n, share)) in points.iter().zip(&line.points) {
            svg.dot(at, 3.0, colour, &format!("{}: {n} nodes, {:.1} %", line.name, share * 100.0));
        }
        let row = TOP + 8.0 + 20.0 * i as f64;
        svg.line((WIDTH - RIGHT + 16.0, row), (WIDTH - RIGHT + 40.0, row), colour, 3.0);
        svg.text((WIDTH - RIGHT + 48.0, row + 4.0), 12.0, Anchor::Start, INK, &line.name);
    }
    svg.done(title)
}
