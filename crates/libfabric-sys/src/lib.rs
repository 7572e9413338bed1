//! Raw libfabric, opened at run time.
//!
//! A program linked against a new libfabric does not start with an old one (`version 'FABRIC_1.9' not found`), and
//! one that links it at all does not start without it. So nothing is linked: [`Library::open`] looks for the shared
//! object and takes its six functions at the symbol versions whose structures are written down in [`types`].
//! Everything else in libfabric is a call through a table of functions, which [`calls`] makes.
//!
//! No policy lives here: which provider, which limits, what to do about a missing library is the caller's.

pub mod calls;
pub mod constants;
mod info;
mod load;
pub mod types;

pub use constants::*;
pub use info::{Info, InfoList};
pub use load::{Library, Looked, Missing, Place, SONAME, Version};
pub use types::*;
