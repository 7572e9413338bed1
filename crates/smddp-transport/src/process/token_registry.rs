//! Under which tokens this process is spoken to: those of its live groups.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use crate::lock;
use crate::token::Token;

/// The process has one memory and one socket for all its groups, so callers name the token that they have.
#[derive(Default)]
pub(crate) struct TokenRegistry {
    by_name: Mutex<HashMap<[u8; 16], Weak<Token>>>,
}

impl TokenRegistry {
    /// Good as long as anybody has it.
    pub(crate) fn add(&self, token: &Arc<Token>) {
        let mut tokens = lock(&self.by_name);
        tokens.retain(|_, token| token.strong_count() > 0);
        tokens.insert(token.id(), Arc::downgrade(token));
    }

    pub(super) fn find(&self, name: &[u8; 16]) -> Option<Arc<Token>> {
        lock(&self.by_name).get(name)?.upgrade()
    }
}
