//! Timeline of a plan: one row for each rank with the transfers of its ports.

use smddp_plan::sim::{Bar, Cluster, Run, Side};

use crate::op::Op;
use crate::simulate::size;
use crate::svg::{Anchor, GRID, INK, Svg};

/// Maximum number of rows. Of larger jobs one node is shown, and the first rank of each other node.
const MAX_ROWS: usize = 16;

const LEFT: f64 = 96.0;
const WIDTH: f64 = 1000.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 84.0;
const ROW: f64 = 30.0;
/// Distance between nodes.
const GAP: f64 = 12.0;
/// Distance in pixels below which small bars are merged.
const MERGE_DISTANCE: f64 = 0.4;

/// Returns the ranks that a picture of the cluster shows.
pub(crate) fn rows(cluster: &Cluster) -> Vec<usize> {
    if cluster.size() <= MAX_ROWS {
        return (0..cluster.size()).collect();
    }
    let own = cluster.ranks[0].min(MAX_ROWS - 4);
    let firsts = cluster.ranks.iter().scan(0, |next, ranks| {
        let first = *next;
        *next += ranks;
        Some(first)
    });
    (0..own).chain(firsts.skip(1).take(MAX_ROWS - own)).collect()
}

const fn style(side: Side) -> (&'static str, &'static str) {
    match side {
        Side::Send => ("#0072b2", "to another node"),
        Side::Receive => ("#56b4e9", "from another node"),
        Side::Write => ("#d55e00", "to its node"),
        Side::Read => ("#e69f00", "from its node"),
    }
}

/// Returns a picture of a run, in which the ranks [`rows`] were recorded.
pub(crate) fn timeline(op: Op, cluster: &Cluster, run: &Run) -> String {
    let rows = rows(cluster);
    let node_of = cluster.node_of();
    let mut at = Vec::with_capacity(rows.len());
    let mut y = TOP;
    for (i, &rank) in rows.iter().enumerate() {
        if i > 0 && node_of[rank] != node_of[rows[i - 1]] {
            y += GAP;
        }
        at.push(y);
        y += ROW;
    }
    let bottom = y;
    let total = run.outcome.seconds.max(1e-12);
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - RIGHT) * seconds / total;
    let mut svg = Svg::new(WIDTH, bottom + 48.0);
    let title = format!(
        "{} of {} by {} on {}, {} nodes, {} ranks (simulated)",
        op.name(),
        size(run.job.decision.bytes() as u64),
        run.job.decision.choice.algorithm.name(),
        cluster.name,
        cluster.nodes(),
        cluster.size()
    );
    svg.text((12.0, 24.0), 15.0, Anchor::Start, INK, &title);
    let mut left = 12.0;
    for side in [Side::Send, Side::Receive, Side::Write, Side::Read] {
        let (colour, name) = style(side);
        svg.rect(left, 38.0, 12.0, 12.0, colour, None);
        svg.text((left + 17.0, 48.0), 11.0, Anchor::Start, INK, name);
        left += 140.0;
    }
    svg.line((left, 44.0), (left + 20.0, 44.0), INK, 1.2);
    svg.text((left + 26.0, 48.0), 11.0, Anchor::Start, INK, "critical path");
    if rows.len() < cluster.size() {
        let text =
            format!("{} of {} ranks: node 0, and the first ranks of its peers", rows.len(), cluster.size());
        svg.text((12.0, 66.0), 11.0, Anchor::Start, INK, &text);
    }
    axis(&mut svg, total, bottom, &x);
    for (i, &rank) in rows.iter().enumerate() {
        let label = format!("node {} rank {rank}", node_of[rank]);
        svg.text((LEFT - 8.0, at[i] + ROW / 2.0 + 3.0), 11.0, Anchor::End, INK, &label);
        svg.line((LEFT, at[i] + ROW - 1.0), (WIDTH - RIGHT, at[i] + ROW - 1.0), GRID, 0.5);
        for (index, side) in [Side::Send, Side::Receive, Side::Write, Side::Read].into_iter().enumerate() {
            let height = (ROW - 4.0) / 4.0;
            let top = at[i] + 1.0 + height * index as f64;
            let of = |bar: &&Bar| bar.rank == rank && bar.side == side;
            bars(&mut svg, run.outcome.bars.iter().filter(of), top, height - 0.8, &x);
        }
    }
    let middle = |rank: usize| rows.iter().position(|&r| r == rank).map(|i| at[i] + ROW / 2.0);
    for step in &run.outcome.path {
        let from = step.on.and_then(middle);
        if let (Some(from), Some(to)) = (from, middle(step.rank)) {
            svg.line((x(step.begin), from), (x(step.end), to), INK, 1.2);
            svg.dot((x(step.end), to), 2.0, INK, &format!("rank {} continues", step.rank));
        }
    }
    svg.done(&title)
}

fn axis(svg: &mut Svg, total: f64, bottom: f64, x: &dyn Fn(f64) -> f64) {
    // A round step that results in five to twelve marks.
    let rough = total / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].map(|m| m * power).into_iter().rfind(|s| *s <= rough).unwrap_or(power);
    let mut mark = 0.0;
    while mark <= total {
        svg.line((x(mark), TOP - 4.0), (x(mark), bottom), GRID, 1.0);
        svg.text((x(mark), bottom + 16.0), 11.0, Anchor::Middle, INK, &format!("{}", round(mark * 1e6)));
        mark += step;
    }
    svg.text((x(total / 2.0), bottom + 34.0), 12.0, Anchor::Middle, INK, "microseconds");
}

fn round(us: f64) -> f64 {
    (us * 1000.0).round() / 1000.0
}

fn bars<'a>(
    svg: &mut Svg,
    bars: impl Iterator<Item = &'a Bar>,
    top: f64,
    height: f64,
    x: &dyn Fn(f64) -> f64,
) {
    let mut open: Option<(f64, f64, String, &'static str)> = None;
    let mut draw = |(begin, end, title, colour): (f64, f64, String, &'static str)| {
        svg.rect(begin, top, (end - begin).max(0.5), height, colour, Some(&title));
    };
    for bar in bars {
        let (begin, end) = (x(bar.begin), x(bar.end));
        let (colour, direction) = style(bar.side);
        let small = end - begin < 4.0 * MERGE_DISTANCE;
        match &mut open {
            Some((_, until, title, _)) if small && begin - *until < MERGE_DISTANCE => {
                *until = until.max(end);
                *title = format!("several messages {direction}");
            }
            _ => {
                let peer = if bar.side == Side::Write { "first reader" } else { "rank" };
                let title = format!(
                    "{} {direction}, {peer} {}: {:.1} to {:.1} us",
                    size(bar.bytes),
                    bar.peer,
                    bar.begin * 1e6,
                    bar.end * 1e6
                );
                if let Some(done) = open.replace((begin, end, title, colour)) {
                    draw(done);
                }
            }
        }
    }
    if let Some(done) = open {
        draw(done);
    }
}
