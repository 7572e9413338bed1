//! The Python module `smddp._core`: conversions only.

mod arguments;
mod arrays;
mod at_once;
mod blocks;
mod bound;
mod buffers;
mod callbacks;
mod comm;
mod errors;
mod info;
mod log;
mod sides;
mod store;
mod symmetric;
mod tensorflow;
mod work;

use pyo3::prelude::*;

/// Returns whether a signal handler wants to run; threads that wait in the core call it a few times a second.
///
/// Python runs handlers on the main thread only. Another thread must not wait for the interpreter here: it is stopped for
/// ever where the interpreter has exited meanwhile.
fn signal_waits() -> bool {
    if smddp_tensorflow::in_kernel() || rustix::thread::gettid() != rustix::process::getpid() {
        return false;
    }
    Python::attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(error) => {
            // `errors::raise` takes it for the core's `Interrupted`.
            error.restore(py);
            true
        }
    })
}

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    smddp_core::set_interrupt(signal_waits);
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::add(module)?;
    module.add_class::<comm::Comm>()?;
    module.add_class::<work::Work>()?;
    module.add_class::<arrays::Arrays>()?;
    module.add_class::<at_once::AtOnce>()?;
    module.add_class::<bound::BoundCall>()?;
    module.add_class::<log::Lines>()?;
    module.add_class::<symmetric::SymmetricBuffer>()?;
    module.add_function(wrap_pyfunction!(info::settings, module)?)?;
    module.add_function(wrap_pyfunction!(info::info, module)?)?;
    module.add_function(wrap_pyfunction!(info::set_exact, module)?)?;
    module.add_function(wrap_pyfunction!(log::say, module)?)?;
    module.add_function(wrap_pyfunction!(log::tells, module)?)?;
    module.add_function(wrap_pyfunction!(info::cuda, module)?)?;
    module.add_function(wrap_pyfunction!(info::fabric, module)?)?;
    module.add_function(wrap_pyfunction!(info::undisturbed, module)?)?;
    module.add_function(wrap_pyfunction!(info::shutdown, module)?)?;
    module.add_function(wrap_pyfunction!(info::leave_error, module)?)?;
    module.add_function(wrap_pyfunction!(info::dump, module)?)?;
    module.add_function(wrap_pyfunction!(info::stacks, module)?)?;
    module.add_function(wrap_pyfunction!(info::frames_from, module)?)?;
    module.add_function(wrap_pyfunction!(info::launched, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_waits, module)?)?;
    module.add_function(wrap_pyfunction!(info::bench_main, module)?)?;
    Ok(())
}
