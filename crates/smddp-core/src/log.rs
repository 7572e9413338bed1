//! One line a fact, in the shape NCCL's users know: `host:pid [rank] SMDDP LEVEL text`.

use std::io::Write;

use crate::config::{Config, Level};

/// Tells `text` if the settings ask for this level.
pub fn say(level: Level, text: &str) {
    if let Ok(config) = Config::get() {
        line(config, level, text);
    }
}

pub(crate) fn line(config: &Config, level: Level, text: &str) {
    if config.debug < level {
        return;
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let (host, pid) = (host.trim(), std::process::id());
    let rank = std::env::var("RANK").unwrap_or_else(|_| "?".to_owned());
    let name = match level {
        Level::None | Level::Version => "VERSION",
        Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Trace => "TRACE",
    };
    let line = format!("{host}:{pid} [{rank}] SMDDP {name} {text}\n");
    let to_file = config.debug_file.as_ref().and_then(|pattern| {
        let path = pattern.replace("%h", host).replace("%p", &pid.to_string());
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        opened
            .inspect_err(|error| eprintln!("smddp: SMDDP_DEBUG_FILE {path}: {error}; told here instead"))
            .ok()
    });
    // Nobody is left to tell if this fails.
    let _ = match to_file {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}
