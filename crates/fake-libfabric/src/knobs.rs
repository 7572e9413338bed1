//! The values of a fabric's knobs, and the report of violations.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::knob::{self, Rule};

/// Number of violations that a fabric reports on standard error. A program may repeat a violation without end.
const REPORTS: u64 = 20;

/// Values of a fabric's knobs, by knob number.
pub struct Knobs([AtomicU64; knob::COUNT]);

impl Knobs {
    /// Returns knobs that are 0.
    pub fn new() -> Self {
        Self([const { AtomicU64::new(0) }; knob::COUNT])
    }

    pub fn set(&self, knob: u64, value: u64) {
        self.0[knob as usize].store(value, Relaxed);
    }

    pub fn get(&self, knob: u64) -> u64 {
        self.0[knob as usize].load(Relaxed)
    }

    /// Returns the value of a limit, or the default if it is not set.
    pub fn limit(&self, knob: u64, default: usize) -> usize {
        match self.get(knob) {
            0 => default,
            limit => limit as usize,
        }
    }

    /// Adds a number to a counter; returns the counter's former value.
    pub fn add(&self, knob: u64, number: u64) -> u64 {
        self.0[knob as usize].fetch_add(number, Relaxed)
    }

    /// Sets bits in a bit set.
    pub fn mark(&self, knob: u64, bits: u64) {
        self.0[knob as usize].fetch_or(bits, Relaxed);
    }

    pub fn enforces(&self, rule: Rule) -> bool {
        self.get(knob::WITHOUT) & rule.bit() == 0
    }

    /// Counts and reports a violation.
    pub fn violation(&self, rule: Rule, description: &str) {
        self.mark(knob::VIOLATED, rule.bit());
        if self.add(knob::VIOLATIONS, 1) < REPORTS {
            eprintln!("fake EFA: {description}");
        }
    }

    /// Counts and reports invalid arguments of a call.
    pub fn check(&self, valid: bool, description: &str) {
        if !valid {
            self.violation(Rule::Call, description);
        }
    }
}
