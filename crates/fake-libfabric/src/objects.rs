//! The objects of an endpoint. Each is a `Box` that `close` frees, and begins with its libfabric structure.

use std::ffi::{c_int, c_void};

use crate::knob;
use crate::simulation::Simulation;
use crate::table::{Name, Table};
use crate::types::*;
use crate::{EINVAL, ENOSYS, none};

#[repr(C)]
pub struct Fabric {
    pub fid: fid_fabric,
}

#[repr(C)]
pub struct Domain {
    pub fid: fid_domain,
    pub table: Box<Table>,
}

#[repr(C)]
pub struct Region {
    pub fid: fid_mr,
    pub domain: *mut Domain,
    pub at: u64,
    pub bytes: u64,
}

#[repr(C)]
pub struct AddressVector {
    pub fid: fid_av,
    pub domain: *mut Domain,
    pub peers: Vec<Name>,
}

#[repr(C)]
pub struct Queue {
    pub fid: fid_cq,
    pub size: usize,
    pub endpoint: *mut Endpoint,
}

#[repr(C)]
pub struct Endpoint {
    pub fid: fid_ep,
    pub domain: *mut Domain,
    pub av: *mut AddressVector,
    /// Number of its port.
    pub number: u64,
}

/// Object classes.
pub const AV_CLASS: usize = 1;
pub const QUEUE_CLASS: usize = 2;

/// Returns the head of an object, whose context is its simulation.
pub fn head<T>(simulation: &'static Simulation, class: usize) -> fid {
    let context = std::ptr::from_ref(simulation).cast_mut().cast();
    fid { fclass: class, context, ops: std::ptr::from_ref(Functions::<T>::ALL).cast_mut() }
}

/// Returns the simulation that an object belongs to.
pub unsafe fn simulation<T>(object: *const T) -> &'static Simulation {
    &*(*object.cast::<fid>()).context.cast()
}

pub unsafe fn open<T>(object: T) -> *mut T {
    let object = Box::into_raw(Box::new(object));
    simulation(object).add(knob::OPEN, 1);
    object
}

/// The functions that every object has.
struct Functions<T>(T);

impl<T> Functions<T> {
    const ALL: &'static fi_ops = &fi_ops {
        size: size_of::<fi_ops>(),
        close: Some(close::<T>),
        bind: Some(bind),
        control: Some(control),
        ..none()
    };
}

unsafe extern "C" fn close<T>(object: *mut fid) -> c_int {
    simulation(object).add(knob::OPEN, 1u64.wrapping_neg());
    drop(Box::from_raw(object.cast::<T>()));
    0
}

/// Binds an endpoint to its address vector or its completion queue.
unsafe extern "C" fn bind(object: *mut fid, to: *mut fid, _: u64) -> c_int {
    let endpoint = object.cast::<Endpoint>();
    match (*to).fclass {
        AV_CLASS => (*endpoint).av = to.cast(),
        QUEUE_CLASS => {
            let queue = to.cast::<Queue>();
            (*queue).endpoint = endpoint;
            let mut network = simulation(object).network();
            let port = network.port((*endpoint).number);
            port.completions = port.completions.min((*queue).size);
        }
        _ => return -EINVAL,
    }
    0
}

unsafe extern "C" fn control(_: *mut fid, command: c_int, _: *mut c_void) -> c_int {
    // Only FI_ENABLE is supported.
    if command == 6 { 0 } else { -ENOSYS }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        unsafe { simulation(self) }.network().close(self.number);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unsafe { (*self.domain).table.deregister(self.fid.key) };
    }
}
