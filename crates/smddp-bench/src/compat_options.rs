//! Options of nccl-tests for graphs, streams and device code, which smddp-bench does not support. Values without effect are
//! accepted, so that scripts for nccl-tests run unchanged. Other values are rejected with the reason.

use clap::Args;

#[derive(Clone, Debug, Args)]
pub(crate) struct CompatOptions {
    /// Ranks are processes, which always start in parallel
    #[arg(short = 'p', long = "parallel_init", alias = "parallel-init", value_name = "0/1", hide = true,
          default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    parallel_init: u8,
    /// Times are always measured with the CPU's clock
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
    /// Option of the device implementation, which does not exist; its short name is that of --version
    #[arg(long = "device_cta_count", alias = "device-cta-count", hide = true, default_value_t = 16)]
    device_cta_count: u32,
}

impl CompatOptions {
    /// Returns the reason for which a selected value is not supported.
    pub(crate) fn unsupported(&self) -> Option<String> {
        let values = [
            ("-y", self.stream_null, "calls use host memory without streams"),
            ("-G", self.cudagraph, "calls use host memory without CUDA graphs"),
            ("-x", self.cta_policy, "calls use host memory without thread blocks of a device"),
            ("-D", self.device_implementation, "a device implementation does not exist"),
        ];
        let (name, value, reason) = values.into_iter().find(|(_, value, _)| *value != 0)?;
        Some(format!("{name} {value} is not supported: {reason}; omit the option, or set it to 0"))
    }
}
