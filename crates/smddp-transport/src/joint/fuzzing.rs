//! What is found out of cards alone.

use super::join::{name, nodes};
use super::offer::check_addresses;
use crate::process::Card;

pub(crate) fn judge(cards: &[Card]) {
    assert_eq!(nodes(cards).len(), cards.len());
    let _ = check_addresses(cards);
    cards.iter().for_each(|card| drop(name(card)));
}
