//! Where ranks that share nothing yet find each other without torch: who started them says which rank each is
//! ([`Launched`]), rank 0 serves a small store at the meeting point ([`Meeting`]), and there they make their group ([`join`]).

#![forbid(unsafe_code)]

mod error;
mod launched;
mod meeting;
mod protocol;
mod server;
mod store;

pub use error::{Error, Result};
pub use launched::{Launched, Meet};
pub use meeting::{Joined, Meeting, Prefixed, Values, join};
pub use server::Server;
#[cfg(any(test, fuzzing))]
pub use server::fuzzing;
