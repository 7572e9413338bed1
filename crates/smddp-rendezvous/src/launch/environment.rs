//! Typed access to environment variables.

use crate::error::{Error, Result};

pub(super) struct Env<'a> {
    pub(super) get: &'a dyn Fn(&str) -> Option<String>,
}

impl Env<'_> {
    /// Returns the trimmed value, or `None` for a variable that is unset or blank.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// Returns the first of `names` that is set, and its value.
    pub(super) fn first<'n>(&self, names: &[&'n str]) -> Option<(&'n str, String)> {
        names.iter().find_map(|name| self.text(name).map(|value| (*name, value)))
    }

    pub(super) fn number(&self, names: &[&str]) -> Result<Option<usize>> {
        let Some((name, value)) = self.first(names) else {
            return Ok(None);
        };
        let parsed = value.parse();
        parsed.map(Some).map_err(|_| Error::Usage(format!("{name} is '{value}': expected a whole number")))
    }

    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(number) = self.number(&[name])? else { return Ok(None) };
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        port.map(Some)
            .ok_or_else(|| Error::Usage(format!("{name} is {number}: expected a port from 1 to 65535")))
    }
}
