//! Options of nccl-tests for what is not here: graphs, streams, device code. A command line that has them with the values
//! that change nothing there runs here as it is; other values are refused with the reason.

use clap::Args;

#[derive(Clone, Debug, Args)]
pub(crate) struct Neutral {
    /// Ranks are processes, which always begin side by side
    #[arg(short = 'p', long = "parallel_init", alias = "parallel-init", value_name = "0/1", hide = true,
          default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    parallel_init: u8,
    /// Times are always those of the processor's clock
    #[arg(short = 'C', long = "report_cputime", alias = "report-cputime", value_name = "0/1", hide = true,
          default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    report_cputime: u8,
    #[arg(short = 'y', long = "stream_null", alias = "stream-null", hide = true, default_value_t = 0)]
    stream_null: u32,
    #[arg(short = 'G', long = "cudagraph", hide = true, default_value_t = 0)]
    cudagraph: u32,
    #[arg(short = 'x', long = "cta_policy", alias = "cta-policy", hide = true, default_value_t = 0)]
    cta_policy: u32,
    #[arg(
        short = 'D',
        long = "device_implementation",
        alias = "device-implementation",
        hide = true,
        default_value_t = 0
    )]
    device_implementation: u32,
    /// Of the device's implementation, which is none here; its short name is --version's
    #[arg(long = "device_cta_count", alias = "device-cta-count", hide = true, default_value_t = 16)]
    device_cta_count: u32,
}

impl Neutral {
    /// Why this cannot be done here, if anything of it is asked for.
    pub(crate) fn refusal(&self) -> Option<String> {
        let asked = [
            ("-y", self.stream_null, "there are no streams: calls are on host memory"),
            ("-G", self.cudagraph, "calls on host memory make no CUDA graph"),
            ("-x", self.cta_policy, "no thread blocks of a device take part"),
            ("-D", self.device_implementation, "there is no implementation on a device"),
        ];
        let (name, value, reason) = asked.into_iter().find(|(_, value, _)| *value != 0)?;
        Some(format!("{name} {value}: {reason}; leave it out, or give 0"))
    }
}
