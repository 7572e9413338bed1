//! Texts that people write, made of arbitrary bytes. See `fuzz/`.

use crate::ir::Collective;
use crate::tune::{Place, Table};

/// A tuning table.
pub fn tune(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Table::parse(text) {
        Ok(table) => {
            assert_eq!(Table::parse(&table.to_string()).as_ref(), Ok(&table), "what is written can be read");
            for entry in &table.entries {
                let ranks = *entry.ranks.start();
                let found =
                    Place::ALL.map(|place| table.algorithm(entry.collective, entry.from, place, ranks));
                assert!(found.iter().any(Option::is_some));
            }
            let _ = Collective::ALL.map(|collective| table.algorithm(collective, u64::MAX, Place::Host, 8));
        }
        Err(error) => {
            let line = text.lines().nth(error.line - 1).unwrap_or_default();
            assert!(error.column <= line.chars().count() + 1, "{error} is beyond the line");
        }
    }
}

#[cfg(test)]
#[path = "../../../fuzz/over.rs"]
mod over;

#[test]
fn a_tuning_table_of_any_bytes_is_read_or_refused() {
    over::over("tune", tune, over::MANY);
}
