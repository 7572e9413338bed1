//! Cards of other ranks, as a store hands them over.

use crate::Card;
use crate::joint::fuzzing::judge;

/// Cards one behind the other, each with its length in front: those of a group.
pub fn card(bytes: &[u8]) {
    let mut cards = Vec::new();
    let mut rest = bytes;
    while let Some((length, behind)) = rest.split_first_chunk::<2>() {
        let (card, behind) = behind.split_at(behind.len().min(u16::from_le_bytes(*length).into()));
        rest = behind;
        if let Ok(card) = Card::from_bytes(card) {
            let again = Card::from_bytes(&card.to_bytes()).map(|card| card.to_bytes());
            assert!(again.is_ok_and(|again| again == card.to_bytes()));
            cards.push(card);
        }
    }
    judge(&cards);
}
