//! Which row is being measured, where stderr is a terminal; gone when the table is complete.

use std::io::Write;

pub(crate) struct Progress<W: Write> {
    /// `None`: nobody looks.
    out: Option<W>,
    row: usize,
    /// `None`: until it is stopped.
    rows: Option<usize>,
    /// Characters that stand there.
    shown: usize,
}

impl<W: Write> Progress<W> {
    pub(crate) fn new(out: Option<W>, rows: Option<usize>) -> Progress<W> {
        let mut progress = Progress { out, row: 0, rows, shown: 0 };
        progress.next();
        progress
    }

    /// The next row has begun, unless there is none.
    pub(crate) fn next(&mut self) {
        self.wipe();
        self.row += 1;
        let text = match self.rows {
            Some(rows) if self.row > rows => return,
            Some(rows) => format!("row {} of {rows}", self.row),
            None => format!("row {}", self.row),
        };
        self.shown = text.len();
        self.put(&text);
    }

    /// Makes way for a line of something else, on the same terminal perhaps.
    pub(crate) fn wipe(&mut self) {
        let blanks = " ".repeat(self.shown);
        if self.shown > 0 {
            self.put(&format!("\r{blanks}\r"));
        }
        self.shown = 0;
    }

    fn put(&mut self, text: &str) {
        if let Some(out) = &mut self.out {
            // A terminal that went away is nothing to stop for.
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }
}

impl<W: Write> Drop for Progress<W> {
    fn drop(&mut self) {
        self.wipe();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_counted_and_the_last_leaves_nothing() {
        let mut written = Vec::new();
        let mut progress = Progress::new(Some(&mut written), Some(2));
        progress.next();
        progress.wipe();
        progress.next();
        drop(progress);
        let wiped = "\r          \r";
        assert_eq!(String::from_utf8(written).unwrap(), format!("row 1 of 2{wiped}row 2 of 2{wiped}"));
    }

    #[test]
    fn an_end_before_the_last_row_leaves_nothing_either() {
        let mut written = Vec::new();
        drop(Progress::new(Some(&mut written), None));
        assert_eq!(written, b"row 1\r     \r");
        drop(Progress::new(None::<Vec<u8>>, Some(3)));
    }
}
