//! The Python module `smddp._core`: conversions between Python objects and the core's types.

#![warn(missing_docs, clippy::missing_errors_doc, clippy::missing_panics_doc)]

mod arguments;
mod arrays;
mod blocks;
mod bound;
mod buffer_pair;
mod buffers;
mod callbacks;
mod comm;
mod errors;
mod fast_path;
mod info;
mod log;
mod store;
mod symmetric;
mod tensorflow;
mod work;

use pyo3::prelude::*;

/// Runs pending Python signal handlers, and returns whether one raised an exception. Threads that wait in the core call this
/// several times a second.
///
/// Python runs handlers on the main thread only. Another thread must not wait for the interpreter here: it would block
/// forever after the interpreter has exited.
fn run_signal_handlers() -> bool {
    if smddp_tensorflow::in_kernel() || rustix::thread::gettid() != rustix::process::getpid() {
        return false;
    }
    Python::attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(error) => {
            // `errors::raise` raises it for the core's `Interrupted`.
            error.restore(py);
            true
        }
    })
}

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    smddp_core::set_interrupt(run_signal_handlers);
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::add(module)?;
    module.add_class::<comm::Comm>()?;
    module.add_class::<work::Work>()?;
    module.add_class::<arrays::Arrays>()?;
    module.add_class::<fast_path::FastPath>()?;
    module.add_class::<bound::BoundCall>()?;
    module.add_class::<log::LogReader>()?;
    module.add_class::<symmetric::SymmetricBuffer>()?;
    module.add_function(wrap_pyfunction!(info::settings, module)?)?;
    module.add_function(wrap_pyfunction!(info::deprecated_settings, module)?)?;
    module.add_function(wrap_pyfunction!(info::info, module)?)?;
    module.add_function(wrap_pyfunction!(info::set_exact, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_line, module)?)?;
    module.add_function(wrap_pyfunction!(log::is_info_enabled, module)?)?;
    module.add_function(wrap_pyfunction!(info::cuda, module)?)?;
    module.add_function(wrap_pyfunction!(info::fabric, module)?)?;
    module.add_function(wrap_pyfunction!(info::undisturbed, module)?)?;
    module.add_function(wrap_pyfunction!(info::shutdown, module)?)?;
    module.add_function(wrap_pyfunction!(info::set_last_error, module)?)?;
    module.add_function(wrap_pyfunction!(info::dump, module)?)?;
    module.add_function(wrap_pyfunction!(info::are_stacks_enabled, module)?)?;
    module.add_function(wrap_pyfunction!(info::set_frame_source, module)?)?;
    module.add_function(wrap_pyfunction!(info::launched, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_is_pending, module)?)?;
    module.add_function(wrap_pyfunction!(info::bench_main, module)?)?;
    Ok(())
}
