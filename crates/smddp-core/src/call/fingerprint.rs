//! Fingerprint of a call: two 64-bit words that are equal on all ranks of the call.
//!
//! `call`: collective, dtype, redop, root, plan. `count`: elements. A hash is added for blocks of different sizes
//! and for a factor, so that calls with equal sums differ.

use smddp_base::CallFingerprint;
use smddp_plan::{Collective, Counts, Decision};

use crate::call::key::{Key, SPARSE};
use crate::call::name_of;
use crate::call::types::{DType, RedOp};

/// Bit of `count`: it holds a hash and a number.
const HASHED: u64 = 1 << 63;
/// Number of bits of that number.
const COUNT_BITS: u32 = 31;
/// Bit of `call`, next to the dtype: elements are compressed between nodes.
const COMPRESSED: u64 = 1 << 15;
/// Name of the call by which a rank leaves the group.
pub(crate) const LEAVING_CALL: &str = "destroy_process_group";
/// Bit of `call`, next to the reduction: the call by which a rank leaves the group.
const LEAVING: u64 = 1 << 23;

/// Returns the fingerprint of a call with this key and decision.
pub(crate) fn of(key: &Key, decision: &Decision) -> CallFingerprint {
    let (choice, pairs) = (decision.choice, decision.uneven_pairs());
    let call = u64::from(key.collective as u8)
        | u64::from(key.dtype as u8) << 8
        | u64::from(key.redop) << 16
        | (if key.collective.has_root() { key.root as u64 & 0xffff } else { 0xffff }) << 24
        | (choice.algorithm as u64) << 40
        | ((choice.segment as u64 >> 6) & 0xffff) << 44
        | u64::from(pairs) << 60
        | if decision.format.is_some() { COMPRESSED } else { 0 };
    CallFingerprint { call, count: count(&decision.counts, key.factor) }
}

fn count(counts: &Counts, factor: u64) -> u64 {
    let (number, name) = match counts {
        // Elements of a block, or of the whole buffer.
        Counts::Even(count) | Counts::Whole(count) => (*count as u64, 0),
        // Only the two ranks of a pair have these counts.
        Counts::Pairs(..) => (0, 0),
        Counts::Uneven(list) => {
            let name = list.iter().fold(1, |name, &count| mix(name ^ mix(count as u64)));
            (list.iter().sum::<usize>() as u64, name)
        }
    };
    if name == 0 && factor == 0 {
        return number;
    }
    let name = mix(name ^ mix(factor)) >> (COUNT_BITS + 1) << COUNT_BITS;
    HASHED | name | number.min((1 << COUNT_BITS) - 1)
}

/// Returns the bits that mark a call on the group's device number `site`, which is the same on all ranks.
pub(crate) fn on_device(site: usize) -> u64 {
    1 << 61 | (site as u64 & 3) << 62
}

pub(crate) fn is_on_device(fingerprint: CallFingerprint) -> bool {
    fingerprint.call >> 61 & 1 == 1
}

/// Marks the fingerprint of a call by which a rank leaves the group.
pub(crate) fn leaving(fingerprint: CallFingerprint) -> CallFingerprint {
    CallFingerprint { call: fingerprint.call | LEAVING, ..fingerprint }
}

pub(crate) fn is_leaving(fingerprint: CallFingerprint) -> bool {
    fingerprint.call & LEAVING != 0
}

/// Returns `None` for a fingerprint that no rank of this version writes.
pub(crate) fn collective(fingerprint: CallFingerprint) -> Option<Collective> {
    Collective::ALL.get((fingerprint.call & 0xff) as usize).copied()
}

pub(crate) fn dtype(fingerprint: CallFingerprint) -> Option<DType> {
    DType::from_u8((fingerprint.call >> 8 & 0x7f) as u8)
}

/// Returns the root of a rooted call.
pub(crate) fn root(fingerprint: CallFingerprint) -> usize {
    (fingerprint.call >> 24 & 0xffff) as usize
}

/// Describes the call that has this fingerprint.
pub(crate) fn call(fingerprint: CallFingerprint) -> String {
    if is_leaving(fingerprint) {
        return LEAVING_CALL.to_owned();
    }
    let Some(collective) = collective(fingerprint) else {
        return format!("an unknown call ({:#x})", fingerprint.call);
    };
    let named = fingerprint.count & HASHED != 0;
    let elements = if named { fingerprint.count & ((1 << COUNT_BITS) - 1) } else { fingerprint.count };
    let dtype = dtype(fingerprint).map_or("?", DType::name);
    let mut text = format!("{}({elements} elements of {dtype}", name_of(collective));
    let redop = RedOp::from_code((fingerprint.call >> 16) as u8, 1.0).filter(|_| collective.reduces());
    if let Some(redop) = redop {
        text += &format!(", {}", redop.name());
    }
    if named {
        let of = if matches!(redop, Some(RedOp::PremulSum(_))) { "factor" } else { "blocks of sizes" };
        text += &format!(", {of} #{:08x}", fingerprint.count << 1 >> (COUNT_BITS + 1));
    }
    if collective.has_root() {
        text += &format!(", root {}", (fingerprint.call >> 24) & 0xffff);
    }
    if collective == Collective::AllGather && (fingerprint.call >> 16) as u8 & 0x7f == SPARSE.code() {
        text += ", of a sparse all_reduce";
    }
    if fingerprint.call & COMPRESSED != 0 {
        text += ", as SMDDP_WIRE_FORMAT says";
    }
    text + if is_on_device(fingerprint) { ") on CUDA" } else { ")" }
}

/// Mixes the bits of a word into a uniformly distributed one (the finalizer of splitmix64).
pub(crate) const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use smddp_plan::{Algorithm, GroupShape, Memory, Network, Settings, Topology, decide};

    fn key(collective: Collective, counts: Counts, factor: f64) -> Key {
        let redop = if factor == 0.0 { RedOp::Sum } else { RedOp::PremulSum(factor) };
        let factor = factor.to_bits();
        Key {
            collective,
            dtype: DType::F32,
            redop: redop.code(),
            factor,
            root: 0,
            counts,
            memory: Memory::Host,
            site: 0,
            lossless: false,
        }
    }

    fn fingerprint(key: &Key) -> CallFingerprint {
        let topology = Topology::single(3);
        let group = GroupShape { topology: &topology, inline_bytes: 0, network: Network::ASSUMED };
        // One algorithm and segment for all counts.
        let plain = Settings { algorithm: Some(Algorithm::Mesh), segment: Some(4096), ..Settings::default() };
        of(key, &decide(&key.shape(), &group, &plain))
    }

    #[test]
    fn block_sizes_and_factors_change_the_fingerprint() {
        let lists = [vec![2, 1, 3], vec![2, 3, 1], vec![3, 2, 1], vec![0, 0, 6], vec![0, 6, 0]];
        let keys: Vec<Key> = lists
            .into_iter()
            .map(|list| key(Collective::ReduceScatter, Counts::Uneven(list), 0.0))
            .chain([key(Collective::ReduceScatter, Counts::Even(2), 0.0)])
            .chain([0.5, 0.25, -0.5].map(|f| key(Collective::ReduceScatter, Counts::Even(2), f)))
            .chain([key(Collective::ReduceScatter, Counts::Uneven(vec![2, 1, 3]), 0.5)])
            .collect();
        for (i, a) in keys.iter().enumerate() {
            assert_eq!(fingerprint(a), fingerprint(a));
            for b in &keys[..i] {
                assert_ne!(fingerprint(a), fingerprint(b), "{a:?} {b:?}");
            }
        }
        assert!(call(fingerprint(&keys[0])).contains("6 elements of float32, sum, blocks of sizes #"));
        assert!(call(fingerprint(&keys[6])).contains("2 elements of float32, premul_sum, factor #"));
    }

    #[test]
    fn sparse_all_gather_has_a_distinct_fingerprint() {
        let plain = key(Collective::AllGather, Counts::Even(1), 0.0);
        let sparse = Key { redop: SPARSE.code(), ..plain.clone() };
        assert_ne!(fingerprint(&plain), fingerprint(&sparse));
        assert!(call(fingerprint(&sparse)).ends_with(", of a sparse all_reduce)"));
        assert!(!call(fingerprint(&plain)).contains("sparse"));
    }

    #[test]
    fn leaving_call_has_a_distinct_fingerprint() {
        let call = fingerprint(&key(Collective::AllReduce, Counts::Whole(3), 0.0));
        assert!(is_leaving(leaving(call)) && !is_leaving(call));
        assert_eq!(super::call(leaving(call)), "destroy_process_group");
    }
}
