//! Reports and error texts of failures: abort reports, descriptions of peers, and the log of calls that ranks compare.

pub(crate) mod call_log;
pub(crate) mod error_text;
pub(crate) mod report;
