//! Fuzz entry points for text input. See `fuzz/`.

use crate::ir::Collective;
use crate::tune::{MemoryKind, Table};

/// Parses and prints a tuning table.
pub fn tune(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Table::parse(text) {
        Ok(table) => {
            assert_eq!(Table::parse(&table.to_string()).as_ref(), Ok(&table), "printed tables can be parsed");
            for entry in &table.entries {
                let ranks = *entry.ranks.start();
                let found = MemoryKind::ALL
                    .map(|memory| table.algorithm(entry.collective, entry.from, memory, ranks));
                assert!(found.iter().any(Option::is_some));
            }
            let _ =
                Collective::ALL.map(|collective| table.algorithm(collective, u64::MAX, MemoryKind::Host, 8));
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
fn tuning_table_of_arbitrary_bytes_is_parsed_or_rejected() {
    over::over("tune", tune, over::MANY);
}
