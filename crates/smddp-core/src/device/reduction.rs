//! Reductions of a step as kernel launches.

use smddp_cuda::{Address, Element, Fold, MAX_SOURCES, Reduction, Rounding};
use smddp_plan::Format;

use super::site::DeviceSite;
use crate::call::types::{DType, RedOp};

/// Element type and reduction of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReductionKind {
    pub(crate) element: Element,
    pub(crate) fold: Fold,
}

impl ReductionKind {
    /// Returns `None` for a dtype that cannot be reduced.
    pub(crate) fn new(dtype: DType, redop: RedOp) -> Option<Self> {
        let element = Element::ALL.into_iter().find(|element| *element as u8 == dtype as u8)?;
        let fold = match redop {
            RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => Fold::Sum,
            RedOp::Prod => Fold::Prod,
            RedOp::Min => Fold::Min,
            RedOp::Max => Fold::Max,
            RedOp::Band => Fold::Band,
            RedOp::Bor => Fold::Bor,
            RedOp::Bxor => Fold::Bxor,
        };
        Some(Self { element, fold })
    }
}

/// A source of a result, in pieces that follow each other.
pub(crate) type Pieces = Vec<(Address, usize)>;

/// Combines the sources in their order into `to`; then divides by `divide` ranks.
///
/// More sources than one launch takes need several launches, each of which rounds.
pub(crate) fn reduce(
    site: &mut DeviceSite,
    kind: ReductionKind,
    sources: &[Pieces],
    to: Address,
    bytes: usize,
    divide: Option<u32>,
) -> smddp_cuda::Result<()> {
    let element = kind.element.size();
    let divide = divide.filter(|_| kind.element != Element::Bool);
    let mut at = 0;
    while at < bytes {
        // The longest range in which no piece of any source ends. An element must not cross such an end.
        let found: Vec<(Address, usize)> = sources.iter().map(|pieces| piece(pieces, at)).collect();
        let length = found.iter().map(|(_, left)| *left).min().unwrap_or(0).min(bytes - at);
        if length < element {
            return Err(smddp_cuda::Error::Invalid(
                "an element crosses two allocations; pass a tensor that is aligned to its elements"
                    .to_owned(),
            ));
        }
        let to = to + at as u64;
        let mut addresses: Vec<Address> = found.into_iter().map(|(address, _)| address).collect();
        while addresses.len() > MAX_SOURCES {
            launch(site, kind, addresses[..MAX_SOURCES].to_vec(), to, length, (None, None))?;
            addresses.splice(..MAX_SOURCES, [to]);
        }
        launch(site, kind, addresses, to, length, (divide, None))?;
        at += length;
    }
    Ok(())
}

fn launch(
    site: &mut DeviceSite,
    kind: ReductionKind,
    sources: Vec<Address>,
    to: Address,
    bytes: usize,
    (divide, times): (Option<u32>, Option<f64>),
) -> smddp_cuda::Result<()> {
    let ReductionKind { element, fold } = kind;
    let count = bytes / element.size();
    site.reduce(&Reduction { element, fold, sources, to, count, divide, times })
}

/// Returns the address at offset `at`, and the bytes from there to the end of its piece.
fn piece(pieces: &Pieces, at: usize) -> (Address, usize) {
    let mut before = 0;
    for &(address, bytes) in pieces {
        if at < before + bytes {
            return (address + (at - before) as u64, before + bytes - at);
        }
        before += bytes;
    }
    (0, 0)
}

/// Rounds 32-bit floats at `from` to a wire format, and stores them as floats at `to`.
pub(crate) fn round(
    site: &mut DeviceSite,
    format: Format,
    from: Address,
    to: Address,
    bytes: usize,
) -> smddp_cuda::Result<()> {
    let rounding = match format {
        Format::Bf16 => Rounding::Bf16,
        Format::F16 => Rounding::F16,
        Format::Int8 => Rounding::Int8,
    };
    site.round(rounding, (to, from), bytes / size_of::<f32>())
}

/// Stores `factor` times `from` at `to`.
pub(crate) fn premultiply(
    site: &mut DeviceSite,
    kind: ReductionKind,
    from: Address,
    to: Address,
    bytes: usize,
    factor: f64,
) -> smddp_cuda::Result<()> {
    launch(site, kind, vec![from], to, bytes, (None, Some(factor)))
}
