//! Packing of tensors into one bucket.

use std::sync::Arc;

use smddp_core::DType;

use crate::bucket::{ALIGN, Bucket};
use crate::kernel::Failure;
use crate::tensor::{InputTensor, Shape};

/// The location of a tensor in a bucket.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PackedRange {
    pub(crate) offset: usize,
    pub(crate) shape: Shape,
}

/// Returns the location of each tensor, the total size in bytes and the common type. Each offset has the alignment of an
/// output tensor.
///
/// # Errors
/// The types differ or are not supported.
pub(crate) fn packed_ranges(shapes: Vec<Shape>) -> Result<(Vec<PackedRange>, usize, DType), Failure> {
    let Some(first) = shapes.first() else { return Err(Failure::invalid("no tensors")) };
    let dtype = first.dtype().map_err(Failure::invalid)?;
    let (mut ranges, mut end): (Vec<PackedRange>, usize) = (Vec::new(), 0);
    for shape in shapes {
        if shape.dtype().map_err(Failure::invalid)? != dtype {
            return Err(Failure::invalid("the tensors of one bucket must have one type"));
        }
        let offset = end.next_multiple_of(ALIGN);
        end = offset + shape.bytes;
        ranges.push(PackedRange { offset, shape });
    }
    Ok((ranges, end, dtype))
}

/// Copies the tensors to their ranges. Fills the padding with zeros, so that no reduction processes uninitialized memory.
pub(crate) fn copy(tensors: &[InputTensor], ranges: &[PackedRange], bucket: &Arc<Bucket>) {
    let mut end = 0;
    for (tensor, range) in tensors.iter().zip(ranges) {
        let bytes = range.shape.bytes;
        // SAFETY: the caller has the only reference to the bucket, which contains all ranges. Ranges do not overlap. The
        // tensor's memory lives as long as `tensors`.
        unsafe {
            bucket.at(end).write_bytes(0, range.offset - end);
            if bytes > 0 {
                bucket.at(range.offset).copy_from_nonoverlapping(tensor.data(), bytes);
            }
        }
        end = range.offset + bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: i32, bytes: usize) -> Shape {
        Shape { kind, dims: vec![bytes as i64], bytes }
    }

    #[test]
    fn tensors_are_packed_with_tensorflows_alignment() {
        let (ranges, bytes, dtype) =
            packed_ranges(vec![shape(1, 12), shape(1, 0), shape(1, 64), shape(1, 4)]).unwrap();
        assert_eq!(ranges.iter().map(|range| range.offset).collect::<Vec<_>>(), [0, 64, 64, 128]);
        assert_eq!((bytes, dtype), (132, DType::F32));
    }

    #[test]
    fn different_or_unsupported_types_are_rejected() {
        assert!(packed_ranges(vec![shape(1, 4), shape(2, 8)]).is_err());
        assert!(packed_ranges(vec![shape(7, 4)]).unwrap_err().text.contains("type number 7"));
        assert!(packed_ranges(Vec::new()).is_err());
    }
}
