//! Stands where a provider was.

use std::os::fd::RawFd;

use super::provider::{Context, Event, Limits, Local, Posted, Provider, Registered, Remote};

pub(crate) struct Gone;

const WHY: &str = "the endpoint belongs to the parent process";

impl Provider for Gone {
    fn describe(&self) -> String {
        "nothing".to_owned()
    }

    fn rails(&self) -> usize {
        0
    }

    fn limits(&self) -> Limits {
        Limits {
            message: 0,
            one_sided: 0,
            operations: 0,
            receives: 0,
            completions: 0,
            writes: false,
            patient: false,
        }
    }

    fn address(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }

    unsafe fn register(&mut self, _: usize, _: *mut u8, _: usize) -> Result<Registered, String> {
        Err(WHY.to_owned())
    }

    fn insert(&mut self, _: usize, _: &[u8]) -> Result<u64, String> {
        Err(WHY.to_owned())
    }

    unsafe fn receive(&mut self, _: usize, _: Local, _: Context) -> Result<Posted, String> {
        Err(WHY.to_owned())
    }

    unsafe fn send(&mut self, _: usize, _: u64, _: Local, _: Context) -> Result<Posted, String> {
        Err(WHY.to_owned())
    }

    unsafe fn read(&mut self, _: usize, _: u64, _: Local, _: Remote, _: Context) -> Result<Posted, String> {
        Err(WHY.to_owned())
    }

    unsafe fn write(
        &mut self,
        _: usize,
        _: u64,
        _: Local,
        _: Remote,
        _: u32,
        _: Context,
    ) -> Result<Posted, String> {
        Err(WHY.to_owned())
    }

    fn poll(&mut self, _: usize, _: &mut Vec<Event>) {}

    fn interest(&mut self, _: &mut Vec<(RawFd, i16)>) -> bool {
        false
    }
}
