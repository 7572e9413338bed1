//! What is found out of cards alone.

use super::join::nodes;
use super::offer::check_addresses;
use crate::Card;

pub(crate) fn judge(cards: &[Card]) {
    assert_eq!(nodes(cards).len(), cards.len());
    let _ = check_addresses(cards);
    cards.iter().for_each(|card| drop(card.name()));
}
