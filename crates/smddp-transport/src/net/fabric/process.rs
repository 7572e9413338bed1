//! The process's engine: one for all its groups, made when the first of them needs it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::choose::{Settings, choose_provider};
use super::engine::Engine;
use super::ofi::Ofi;
use super::staging::Staging;
use super::wire::Shared;
use crate::shm::Endpoint;

/// Where an endpoint keeps its engine.
#[derive(Default)]
pub(crate) struct Slot(Mutex<Option<(Settings, Weak<Mutex<Engine>>)>>);

/// Of the staging pool's cap, the part that receive buffers may take: one in so many.
const SHARE: usize = 4;

/// The staging pool's memory as engines use it.
pub(crate) fn staging(endpoint: &Endpoint) -> Staging {
    let (base, bytes) = endpoint.pinnable();
    Staging::new(base, bytes, endpoint.memory.clone())
}

impl Endpoint {
    /// The process's fabric, and what was found when it was made (nothing when it was made before). `peers`: of the
    /// largest group to be expected; the first group's counts.
    pub(crate) fn fabric(&self, settings: &Settings, peers: usize) -> Result<(Shared, Vec<String>), String> {
        let mut slot = self.fabric.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made_with, engine)) = &*slot
            && let Some(engine) = engine.upgrade()
        {
            if made_with != settings {
                return Err("this process already has a fabric that was made with other settings".to_owned());
            }
            return Ok((engine, Vec::new()));
        }
        let (choice, lines) = choose_provider(settings);
        let ofi = Ofi::open(&choice.map_err(|why| why.to_string())?)?;
        let engine = Engine::new(Box::new(ofi), staging(self), peers, self.staging().0 / SHARE)?;
        let engine = Arc::new(Mutex::new(engine));
        *slot = Some((settings.clone(), Arc::downgrade(&engine)));
        Ok((engine, lines))
    }
}
