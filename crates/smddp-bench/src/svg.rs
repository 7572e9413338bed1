//! Writer of SVG pictures: lines, boxes, texts. The colors fit light and dark pages.

use std::fmt::Write;

/// Colors of series, distinguishable with color vision deficiency.
pub(crate) const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"];
pub(crate) const INK: &str = "#333333";
pub(crate) const GRID: &str = "#dddddd";

/// Alignment of a text at its point.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture; (0, 0) is its upper left corner.
pub(crate) struct Svg {
    body: String,
    width: f64,
    height: f64,
}

impl Svg {
    pub(crate) fn new(width: f64, height: f64) -> Svg {
        let mut svg = Svg { body: String::new(), width, height };
        svg.rect(0.0, 0.0, width, height, "#ffffff", None);
        svg
    }

    fn put(&mut self, args: std::fmt::Arguments<'_>) {
        // Writing to a String does not fail.
        let _ = self.body.write_fmt(args);
        self.body.push('\n');
    }

    /// Draws a filled box. `title` is its tooltip.
    pub(crate) fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, fill: &str, title: Option<&str>) {
        let shape = format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\""
        );
        match title {
            Some(title) => self.put(format_args!("{shape}><title>{}</title></rect>", escape(title))),
            None => self.put(format_args!("{shape}/>")),
        }
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64) {
        self.put(format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{stroke}\" stroke-width=\"{width}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    pub(crate) fn polyline(&mut self, points: &[(f64, f64)], stroke: &str, width: f64) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.put(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"{width}\"/>",
            points.join(" ")
        ));
    }

    pub(crate) fn dot(&mut self, at: (f64, f64), radius: f64, fill: &str, title: &str) {
        self.put(format_args!(
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\" fill=\"{fill}\"><title>{}</title></circle>",
            at.0,
            at.1,
            escape(title)
        ));
    }

    pub(crate) fn text(&mut self, at: (f64, f64), size: f64, anchor: Anchor, fill: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.put(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{}</text>",
            at.0,
            at.1,
            escape(text)
        ));
    }

    /// Returns the text of the file.
    pub(crate) fn done(self, title: &str) -> String {
        let Svg { body, width, height } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" role=\"img\">\n<title>{}</title>\n{body}</svg>\n",
            escape(title)
        )
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text((0.0, 0.0), 8.0, Anchor::Start, INK, "a <b> & \"c\"");
        let done = svg.done("<x>");
        assert!(
            done.contains("a &lt;b&gt; &amp; &quot;c&quot;") && done.contains("<title>&lt;x&gt;</title>")
        );
        assert!(done.starts_with("<svg ") && done.ends_with("</svg>\n"));
    }
}
