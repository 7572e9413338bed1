//! Raw bindings to libfabric, loaded at run time.
//!
//! A program linked against a new libfabric does not start with an old one (`version 'FABRIC_1.9' not found`), and a
//! linked program does not start without libfabric. Therefore nothing is linked: [`Library::open`] searches for the
//! shared object and resolves its six functions at the symbol versions whose structures [`types`] defines.
//! All other libfabric functions are calls through function tables, which [`calls`] makes.
//!
//! The crate contains no policy: the caller selects the provider and the limits, and handles a missing library.

#![warn(missing_docs, clippy::missing_errors_doc, clippy::missing_panics_doc)]

pub mod calls;
pub mod constants;
mod info;
mod load;
pub mod types;

pub use constants::*;
pub use info::{Info, InfoList};
pub use load::{Attempt, Library, Missing, Place, SONAME, Version};
pub use types::*;
