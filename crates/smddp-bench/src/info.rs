//! `smddp-bench info`: lists the engine's settings.

use std::io::{Write, stdout};

use smddp_core::Config;
use smddp_core::config::{DEPRECATED, SETTINGS};

use crate::error::{Error, Result};

/// Prints name, default and description of every setting. An invalid value in the environment is an error.
pub(crate) fn print() -> Result<()> {
    Config::get()?;
    let mut out = stdout().lock();
    for setting in SETTINGS {
        let default = if setting.default.is_empty() { "-" } else { setting.default };
        writeln!(out, "{:<22} {default:<6} {}", setting.name, setting.description)
            .map_err(Error::io("writing"))?;
    }
    for deprecated in DEPRECATED {
        let (replacement, equivalents) = (deprecated.replacement, deprecated.equivalents);
        writeln!(out, "{:<22} deprecated: use {replacement} ({equivalents})", deprecated.name)
            .map_err(Error::io("writing"))?;
    }
    Ok(())
}
