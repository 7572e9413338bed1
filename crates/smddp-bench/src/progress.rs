//! Progress indicator on stderr: the current row or simulation. It is cleared when the table is complete.

use std::io::Write;

pub(crate) struct Progress<W: Write> {
    /// `None` if stderr is not a terminal.
    out: Option<W>,
    row: usize,
    /// `None` for an unlimited number of rows.
    rows: Option<usize>,
    /// Number of displayed characters.
    shown: usize,
}

impl<W: Write> Progress<W> {
    pub(crate) fn new(out: Option<W>, rows: Option<usize>) -> Progress<W> {
        let mut progress = Progress { out, row: 0, rows, shown: 0 };
        progress.next();
        progress
    }

    /// Returns an indicator that displays the texts of `show`.
    pub(crate) fn idle(out: Option<W>) -> Progress<W> {
        Progress { out, row: 0, rows: None, shown: 0 }
    }

    /// Replaces the displayed text.
    pub(crate) fn show(&mut self, text: &str) {
        self.clear();
        self.shown = text.len();
        self.put(text);
    }

    /// Displays the next row, if any.
    pub(crate) fn next(&mut self) {
        self.clear();
        self.row += 1;
        let text = match self.rows {
            Some(rows) if self.row > rows => return,
            Some(rows) => format!("row {} of {rows}", self.row),
            None => format!("row {}", self.row),
        };
        self.show(&text);
    }

    /// Clears the line, because other output may follow on the same terminal.
    pub(crate) fn clear(&mut self) {
        let blanks = " ".repeat(self.shown);
        if self.shown > 0 {
            self.put(&format!("\r{blanks}\r"));
        }
        self.shown = 0;
    }

    fn put(&mut self, text: &str) {
        if let Some(out) = &mut self.out {
            // An error of a closed terminal is ignored.
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }
}

impl<W: Write> Drop for Progress<W> {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_and_the_line_is_cleared_after_the_last() {
        let mut written = Vec::new();
        let mut progress = Progress::new(Some(&mut written), Some(2));
        progress.next();
        progress.clear();
        progress.next();
        drop(progress);
        let wiped = "\r          \r";
        assert_eq!(String::from_utf8(written).unwrap(), format!("row 1 of 2{wiped}row 2 of 2{wiped}"));
    }

    #[test]
    fn shown_text_replaces_the_one_before() {
        let mut written = Vec::new();
        let mut progress = Progress::idle(Some(&mut written));
        progress.show("abc");
        progress.show("d");
        drop(progress);
        assert_eq!(written, b"abc\r   \rd\r \r");
    }

    #[test]
    fn line_is_cleared_before_the_last_row_too() {
        let mut written = Vec::new();
        drop(Progress::new(Some(&mut written), None));
        assert_eq!(written, b"row 1\r     \r");
        drop(Progress::new(None::<Vec<u8>>, Some(3)));
    }
}
