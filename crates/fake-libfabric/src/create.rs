//! Creation of fabrics, domains, endpoints, address vectors, completion queues and memory registrations.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;

use crate::calls::{ADDRESS_VECTOR, ENDPOINT, MESSAGES, NAMES, ONE_SIDED, QUEUE};
use crate::knob::{self, Rule};
use crate::objects::*;
use crate::simulation::{Simulation, unique};
use crate::table::Table;
use crate::types::*;
use crate::{EIO, ENOMEM, ENOSYS, none};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_fabric(
    attr: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    let simulation = Simulation::selected();
    simulation.check(
        !attr.is_null() && !(*attr).prov_name.is_null(),
        "fi_fabric: the attributes have no provider name",
    );
    let ops = (&raw const FABRIC).cast_mut();
    let fid = head::<Fabric>(simulation, 0);
    *fabric = open(Fabric { fid: fid_fabric { fid, ops, api_version: 0 } }).cast();
    0
}

unsafe extern "C" fn domain(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    found: *mut *mut fid_domain,
    _: *mut c_void,
) -> c_int {
    let simulation = simulation(fabric);
    simulation.check(!(*info).nic.is_null(), "fi_domain: the info has no device");
    let (ops, mr) = ((&raw const DOMAIN).cast_mut(), (&raw const MEMORY).cast_mut());
    let fid = head::<Domain>(simulation, 0);
    *found = open(Domain { fid: fid_domain { fid, ops, mr }, table: Table::new(unique()) }).cast();
    0
}

/// As short as the table of an old provider: callers must not read beyond its size.
static FABRIC: fi_ops_fabric =
    fi_ops_fabric { size: offset_of!(fi_ops_fabric, trywait), domain: Some(domain), ..none() };

unsafe extern "C" fn av_open(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    found: *mut *mut fid_av,
    _: *mut c_void,
) -> c_int {
    let simulation = simulation(domain);
    simulation.check((*attr).kind == 2, "fi_av_open: the type is not FI_AV_TABLE");
    let fid = head::<AddressVector>(simulation, AV_CLASS);
    let fid = fid_av { fid, ops: (&raw const ADDRESS_VECTOR).cast_mut() };
    *found = open(AddressVector { fid, domain: domain.cast(), peers: Vec::new() }).cast();
    0
}

unsafe extern "C" fn cq_open(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    found: *mut *mut fid_cq,
    _: *mut c_void,
) -> c_int {
    if (*attr).wait_obj != 0 {
        return -ENOSYS;
    }
    let simulation = simulation(domain);
    simulation.check(
        (*attr).format == 3 && (*attr).size > 0,
        "fi_cq_open: the format is not FI_CQ_FORMAT_DATA, or the size is 0",
    );
    let fid = fid_cq { fid: head::<Queue>(simulation, QUEUE_CLASS), ops: (&raw const QUEUE).cast_mut() };
    *found = open(Queue { fid, size: (*attr).size, endpoint: null_mut() }).cast();
    0
}

unsafe extern "C" fn endpoint(
    domain: *mut fid_domain,
    _: *mut fi_info,
    found: *mut *mut fid_ep,
    _: *mut c_void,
) -> c_int {
    let (simulation, domain) = (simulation(domain), domain.cast::<Domain>());
    let Ok(number) = simulation.network().open(simulation, (*domain).table.name()) else { return -EIO };
    let fid = fid_ep {
        fid: head::<Endpoint>(simulation, 0),
        ops: (&raw const ENDPOINT).cast_mut(),
        cm: (&raw const NAMES).cast_mut(),
        msg: (&raw const MESSAGES).cast_mut(),
        rma: (&raw const ONE_SIDED).cast_mut(),
        tagged: null_mut(),
        atomic: null_mut(),
        collective: null_mut(),
    };
    *found = open(Endpoint { fid, domain, av: null_mut(), number }).cast();
    0
}

static DOMAIN: fi_ops_domain = fi_ops_domain {
    size: size_of::<fi_ops_domain>(),
    av_open: Some(av_open),
    cq_open: Some(cq_open),
    endpoint: Some(endpoint),
    ..none()
};

unsafe extern "C" fn regattr(
    domain: *mut fid,
    attr: *const fi_mr_attr,
    _: u64,
    found: *mut *mut fid_mr,
) -> c_int {
    // One range is supported, and fields that newer versions appended must be zero.
    let a = &*attr;
    let simulation = simulation(domain);
    simulation.check(
        a.iov_count == 1 && a.access != 0 && a.iface == 0,
        "fi_mr_regattr: expected one range, an access mode and host memory",
    );
    let appended = !a.hmem_data.is_null() || a.page_size != 0 || !a.base_mr.is_null() || a.sub_mr_cnt != 0;
    simulation.check(!appended, "fi_mr_regattr: a field of a newer version is not zero");
    let domain = domain.cast::<Domain>();
    let (at, bytes) = ((*a.mr_iov).iov_base as u64, (*a.mr_iov).iov_len as u64);
    simulation.add(knob::REGIONS, 1);
    let key = match simulation.enforces(Rule::Key) {
        // Not small, and never 0.
        true => simulation.network().random.next() & 0xffff_ffff | 1 << 20,
        false => a.requested_key,
    };
    let base = if simulation.enforces(Rule::Address) { at } else { 0 };
    if !(*domain).table.register(key, at, bytes, base) {
        return -ENOMEM;
    }
    let fid = fid_mr { fid: head::<Region>(simulation, 0), mem_desc: null_mut(), key };
    let region = open(Region { fid, domain, at, bytes });
    (*region).fid.mem_desc = region.cast();
    *found = region.cast();
    0
}

static MEMORY: fi_ops_mr = fi_ops_mr { size: size_of::<fi_ops_mr>(), regattr: Some(regattr), ..none() };
