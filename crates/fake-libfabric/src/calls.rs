//! The functions of endpoints, address vectors and completion queues.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::knob::{self, Rule};
use crate::objects::{AddressVector, Endpoint, Queue, Region, simulation};
use crate::port::{Entry, Local, byte_limits};
use crate::table::{Name, Remote};
use crate::types::*;
use crate::{EAGAIN, EAVAIL, EINVAL, ENOMEM, ENOPROTOOPT, none};

unsafe extern "C" fn insert(
    av: *mut fid_av,
    address: *const c_void,
    count: usize,
    found: *mut fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    let simulation = simulation(av);
    simulation.check(!address.is_null() && count == 1, "fi_av_insert: expected exactly one address");
    let av = &mut *av.cast::<AddressVector>();
    let name = Name::of(address.cast::<[u8; Name::BYTES]>().read_unaligned());
    if !(*av.domain).table.add_peer(name) {
        return -ENOMEM;
    }
    simulation.add(knob::INSERTED, 1);
    *found = av.peers.len() as u64;
    av.peers.push(name);
    1
}

pub static ADDRESS_VECTOR: fi_ops_av =
    fi_ops_av { size: size_of::<fi_ops_av>(), insert: Some(insert), ..none() };

unsafe extern "C" fn read(queue: *mut fid_cq, room: *mut c_void, count: usize) -> isize {
    let queue = queue.cast::<Queue>();
    let number = (*(*queue).endpoint).number;
    let mut network = simulation(queue).network();
    let entries = network.read(number, count);
    for (at, entry) in entries.iter().enumerate() {
        let Entry { context, flags, bytes, data, .. } = *entry;
        let line = fi_cq_data_entry { op_context: context, flags, len: bytes, buf: null_mut(), data };
        room.cast::<fi_cq_data_entry>().add(at).write(line);
    }
    match entries.len() {
        0 if network.port(number).has_failed() => -(EAVAIL as isize),
        0 => -(EAGAIN as isize),
        count => count as isize,
    }
}

unsafe extern "C" fn readerr(queue: *mut fid_cq, room: *mut fi_cq_err_entry, _: u64) -> isize {
    let queue = queue.cast::<Queue>();
    let number = (*(*queue).endpoint).number;
    let Some(entry) = simulation(queue).network().port(number).take_error() else {
        return -(EAGAIN as isize);
    };
    (*room).op_context = entry.context;
    (*room).flags = entry.flags;
    (*room).err = entry.error;
    1
}

pub static QUEUE: fi_ops_cq =
    fi_ops_cq { size: size_of::<fi_ops_cq>(), read: Some(read), readerr: Some(readerr), ..none() };

unsafe extern "C" fn setopt(
    object: *mut fid,
    _: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    let simulation = simulation(object);
    if simulation.get(knob::NO_OPTIONS) != 0 {
        return -ENOPROTOOPT;
    }
    simulation.check(len == 1 && *value.cast::<u8>() == 0, "fi_setopt: expected a one-byte value of 0");
    simulation.mark(knob::OPTIONS, 1 << name);
    0
}

unsafe extern "C" fn getopt(
    object: *mut fid,
    _: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    let simulation = simulation(object);
    if simulation.get(knob::NO_OPTIONS) != 0 {
        return -ENOPROTOOPT;
    }
    let (message, one_sided) = byte_limits(simulation);
    match name {
        12 if *len >= 8 => *value.cast::<usize>() = message,
        14 if *len >= 8 => *value.cast::<usize>() = one_sided,
        n if n == 2 - (0xefa << 16) && *len >= 1 => {
            *value.cast::<u8>() = simulation.get(knob::EMULATED_WRITE) as u8;
            *len = 1;
        }
        _ => return -ENOPROTOOPT,
    }
    0
}

pub static ENDPOINT: fi_ops_ep =
    fi_ops_ep { size: size_of::<fi_ops_ep>(), getopt: Some(getopt), setopt: Some(setopt), ..none() };

unsafe extern "C" fn getname(object: *mut fid, address: *mut c_void, len: *mut usize) -> c_int {
    if *len < Name::BYTES {
        return -EINVAL;
    }
    *len = Name::BYTES;
    let endpoint = object.cast::<Endpoint>();
    address.cast::<[u8; Name::BYTES]>().write_unaligned((*(*endpoint).domain).table.name().bytes());
    0
}

pub static NAMES: fi_ops_cm = fi_ops_cm { size: size_of::<fi_ops_cm>(), getname: Some(getname), ..none() };

/// Checks the size of an operation.
unsafe fn fits(endpoint: *mut fid_ep, bytes: usize, rule: Rule) -> bool {
    let simulation = simulation(endpoint);
    let (message, one_sided) = byte_limits(simulation);
    let limit = if rule == Rule::Message { message } else { one_sided };
    if bytes > limit {
        simulation.violation(rule, &format!("an operation of {bytes} bytes, more than the limit of {limit}"));
    }
    bytes <= limit
}

/// Returns the local memory of an operation, or `None` if it is not registered.
unsafe fn local(
    endpoint: *mut fid_ep,
    at: *const c_void,
    bytes: usize,
    desc: *mut c_void,
    context: *mut c_void,
) -> Option<Local> {
    let simulation = simulation(endpoint);
    let region = desc.cast::<Region>();
    let start = at as u64;
    let inside =
        !region.is_null() && start >= (*region).at && start + bytes as u64 <= (*region).at + (*region).bytes;
    let valid = inside || !simulation.enforces(Rule::Descriptor);
    if !valid {
        let text = "the descriptor does not cover the memory of the operation";
        simulation.violation(Rule::Descriptor, text);
    }
    simulation.check(!context.is_null(), "the operation has no context");
    valid.then_some(Local { at: at.cast_mut().cast(), bytes, context })
}

unsafe fn number(endpoint: *mut fid_ep) -> u64 {
    (*endpoint.cast::<Endpoint>()).number
}

/// Returns the name behind an address, or `None` if the address is not in the address vector.
unsafe fn peer(endpoint: *mut fid_ep, address: fi_addr_t) -> Option<Name> {
    let av = (*endpoint.cast::<Endpoint>()).av.as_ref()?;
    let found = av.peers.get(address as usize).copied();
    if found.is_none() {
        simulation(endpoint).violation(Rule::AddressVector, "the address is not in the address vector");
    }
    found
}

unsafe extern "C" fn recv(
    endpoint: *mut fid_ep,
    at: *mut c_void,
    bytes: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let simulation = simulation(endpoint);
    simulation.check(from == u64::MAX, "fi_recv: receiving from one peer is not supported");
    let Some(local) = local(endpoint, at, bytes, desc, context) else { return -(EINVAL as isize) };
    simulation.add(knob::POSTED, 1);
    simulation.network().port(number(endpoint)).receive(local) as isize
}

unsafe extern "C" fn send(
    endpoint: *mut fid_ep,
    at: *const c_void,
    bytes: usize,
    desc: *mut c_void,
    to: fi_addr_t,
    context: *mut c_void,
) -> isize {
    if !fits(endpoint, bytes, Rule::Message) {
        return -(EINVAL as isize);
    }
    let (Some(local), Some(to)) = (local(endpoint, at, bytes, desc, context), peer(endpoint, to)) else {
        return -(EINVAL as isize);
    };
    simulation(endpoint).network().send(number(endpoint), to, local) as isize
}

pub static MESSAGES: fi_ops_msg =
    fi_ops_msg { size: size_of::<fi_ops_msg>(), recv: Some(recv), send: Some(send), ..none() };

unsafe extern "C" fn read_from(
    endpoint: *mut fid_ep,
    at: *mut c_void,
    bytes: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    if !fits(endpoint, bytes, Rule::OneSided) {
        return -(EINVAL as isize);
    }
    let (Some(local), Some(from)) = (local(endpoint, at, bytes, desc, context), peer(endpoint, from)) else {
        return -(EINVAL as isize);
    };
    let remote = Remote { at: address, key };
    simulation(endpoint).network().one_sided(number(endpoint), from, local, remote, None) as isize
}

unsafe extern "C" fn write_data(
    endpoint: *mut fid_ep,
    at: *const c_void,
    bytes: usize,
    desc: *mut c_void,
    data: u64,
    to: fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    if !fits(endpoint, bytes, Rule::OneSided) {
        return -(EINVAL as isize);
    }
    let simulation = simulation(endpoint);
    if simulation.get(knob::EMULATED_WRITE) != 0 && simulation.enforces(Rule::Writes) {
        simulation.violation(Rule::Writes, "fi_writedata: the device does not support writes");
        return -(EINVAL as isize);
    }
    simulation.check(data <= u64::from(u32::MAX), "fi_writedata: the immediate data has more than 32 bits");
    let (Some(local), Some(to)) = (local(endpoint, at, bytes, desc, context), peer(endpoint, to)) else {
        return -(EINVAL as isize);
    };
    let remote = Remote { at: address, key };
    simulation.network().one_sided(number(endpoint), to, local, remote, Some(data as u32)) as isize
}

pub static ONE_SIDED: fi_ops_rma = fi_ops_rma {
    size: size_of::<fi_ops_rma>(),
    read: Some(read_from),
    writedata: Some(write_data),
    ..none()
};
