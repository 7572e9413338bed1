//! Layouts of the structures, compared with C.

use std::mem::{offset_of, size_of};

use super::*;

/// Sizes and offsets that a C compiler computes from the headers of 1.17 on 64-bit Linux.
#[test]
fn layouts_are_those_of_c() {
    let sizes = [
        (size_of::<fi_info>(), 120),
        (size_of::<fi_tx_attr>(), 80),
        (size_of::<fi_rx_attr>(), 64),
        (size_of::<fi_ep_attr>(), 96),
        (size_of::<fi_domain_attr>(), 192),
        (size_of::<fi_fabric_attr>(), 32),
        (size_of::<fi_device_attr>(), 48),
        (size_of::<fi_pci_attr>(), 6),
        (size_of::<fi_bus_attr>(), 12),
        (size_of::<fi_link_attr>(), 40),
        (size_of::<fid>(), 24),
        (size_of::<fi_ops>(), 56),
        (size_of::<fi_ops_fabric>(), 56),
        (size_of::<fid_fabric>(), 40),
        (size_of::<fid_nic>(), 56),
        (size_of::<fi_av_attr>(), 48),
        (size_of::<fi_ops_av>(), 64),
        (size_of::<fid_av>(), 32),
        (size_of::<fid_mr>(), 40),
        (size_of::<fi_ops_domain>(), 96),
        (size_of::<fi_ops_mr>(), 32),
        (size_of::<fid_domain>(), 40),
        (size_of::<fi_ops_ep>(), 64),
        (size_of::<fi_ops_msg>(), 80),
        (size_of::<fi_ops_cm>(), 80),
        (size_of::<fi_ops_rma>(), 80),
        (size_of::<fid_ep>(), 80),
        (size_of::<fi_cq_attr>(), 40),
        (size_of::<fi_cq_data_entry>(), 40),
        (size_of::<fi_ops_cq>(), 64),
        (size_of::<fid_cq>(), 32),
        (size_of::<fi_context2>(), 64),
    ];
    for (i, (here, there)) in sizes.into_iter().enumerate() {
        assert_eq!(here, there, "size {i}");
    }
    let offsets = [
        (offset_of!(fi_domain_attr, mr_mode), 36),
        (offset_of!(fi_domain_attr, caps), 136),
        (offset_of!(fi_domain_attr, tclass), 184),
        (offset_of!(fi_info, nic), 112),
        (offset_of!(fi_tx_attr, inject_size), 40),
        (offset_of!(fi_ep_attr, max_msg_size), 16),
        (offset_of!(fi_mr_attr, iface), 64),
        (offset_of!(fi_mr_attr, device), 72),
        (offset_of!(fi_cq_err_entry, err_data_size), 72),
        (offset_of!(fi_ops_ep, setopt), 24),
        (offset_of!(fi_ops_msg, send), 32),
        (offset_of!(fi_ops_rma, writedata), 64),
        (offset_of!(fi_ops_cm, getname), 16),
        (offset_of!(fi_ops_fabric, trywait), 40),
        (offset_of!(fid_ep, rma), 48),
        (offset_of!(fi_ops_cq, strerror), 56),
    ];
    for (i, (here, there)) in offsets.into_iter().enumerate() {
        assert_eq!(here, there, "offset {i}");
    }
}

#[test]
fn iovec_matches_the_system_layout() {
    assert_eq!(size_of::<iovec>(), size_of::<libc::iovec>());
    assert_eq!(offset_of!(iovec, iov_len), offset_of!(libc::iovec, iov_len));
}

/// In 1.17 both structures have 80 bytes.
#[test]
fn caller_allocated_structures_have_the_size_of_2_x() {
    assert_eq!(size_of::<fi_mr_attr>(), 112);
    assert_eq!(size_of::<fi_cq_err_entry>(), 88);
}
