//! Time limits of the failure monitor.

use std::time::Duration;

/// Time limits of the monitor.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Time within which all processes of a node detect the death of one of them.
    pub(crate) death_report: Duration,
    /// Time to wait for the last messages of a departed peer, and for its acknowledgement of this rank's data. Between
    /// nodes, messages and leave frames use separate connections. The frame `Kind::LastMessage` ends the messages. For
    /// messages, this limit applies only if the peer died before it sent that frame.
    pub(crate) departure_grace: Duration,
    /// Time to wait for another rank's report, or for data of a rank that failed in a later call.
    pub(crate) abort_report: Duration,
    /// Wait after which a call logs the late ranks.
    pub(crate) late_log: Duration,
    /// Wait after which a call queries the late ranks and warns, and the interval of the warnings.
    pub(crate) warning: Duration,
    /// Time limit of a whole query; ranks without a reply by then are reported as unknown. With responsive hosts,
    /// thousands of ranks reply in a fraction of it.
    pub(crate) query: Duration,
    /// Time to wait for the abort report of a rank that queries a straggler directly.
    pub(crate) report_wait: Duration,
    /// Interval between two observations while the monitor waits for a report, and the first one of a query.
    pub(crate) poll: Duration,
    /// Longest interval between two observations during a query.
    pub(crate) query_poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            death_report: Duration::from_secs(1),
            departure_grace: Duration::from_secs(1),
            abort_report: Duration::from_millis(250),
            late_log: Duration::from_secs(2),
            warning: Duration::from_secs(60),
            query: Duration::from_secs(10),
            report_wait: Duration::from_secs(3),
            poll: Duration::from_millis(1),
            query_poll: Duration::from_millis(20),
        }
    }
}
