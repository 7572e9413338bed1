//! Tokens of the live groups of this process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use smddp_base::lock;
use smddp_net::token::Token;

/// Tokens by name. All groups share the memory and the socket of the process, so an initiator names its token.
#[derive(Default)]
pub(crate) struct TokenRegistry {
    by_name: Mutex<HashMap<[u8; 16], Weak<Token>>>,
}

impl TokenRegistry {
    /// Registers a token while it has other holders.
    pub(crate) fn add(&self, token: &Arc<Token>) {
        let mut tokens = lock(&self.by_name);
        tokens.retain(|_, token| token.strong_count() > 0);
        tokens.insert(token.id(), Arc::downgrade(token));
    }

    pub(super) fn find(&self, name: &[u8; 16]) -> Option<Arc<Token>> {
        lock(&self.by_name).get(name)?.upgrade()
    }
}
