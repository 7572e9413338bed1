//! Tensors of one bucket, one after the other.

use std::sync::Arc;

use smddp_core::DType;

use crate::bucket::{ALIGN, Bucket};
use crate::kernel::Failure;
use crate::tensor::{Given, Shape};

/// A tensor's place in a bucket.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) offset: usize,
    pub(crate) shape: Shape,
}

/// Where each tensor goes, the bytes of all, and their type. Each begins where an output tensor may.
///
/// # Errors
/// Types that differ or cannot be sent.
pub(crate) fn places(shapes: Vec<Shape>) -> Result<(Vec<Place>, usize, DType), Failure> {
    let Some(first) = shapes.first() else { return Err(Failure::invalid("no tensors are given")) };
    let dtype = first.dtype().map_err(Failure::invalid)?;
    let (mut places, mut end): (Vec<Place>, usize) = (Vec::new(), 0);
    for shape in shapes {
        if shape.dtype().map_err(Failure::invalid)? != dtype {
            return Err(Failure::invalid("tensors of one bucket have one type"));
        }
        let offset = end.next_multiple_of(ALIGN);
        end = offset + shape.bytes;
        places.push(Place { offset, shape });
    }
    Ok((places, end, dtype))
}

/// Copies the tensors to their places. What lies between them is zero, which every reduction leaves a number.
pub(crate) fn copy(tensors: &[Given], places: &[Place], bucket: &Arc<Bucket>) {
    let mut end = 0;
    for (tensor, place) in tensors.iter().zip(places) {
        let bytes = place.shape.bytes;
        // SAFETY: the bucket was just taken and is nobody else's; it holds all places, which do not overlap; the tensor's
        // memory lives as long as `tensors`.
        unsafe {
            bucket.at(end).write_bytes(0, place.offset - end);
            if bytes > 0 {
                bucket.at(place.offset).copy_from_nonoverlapping(tensor.data(), bytes);
            }
        }
        end = place.offset + bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: i32, bytes: usize) -> Shape {
        Shape { kind, dims: vec![bytes as i64], bytes }
    }

    #[test]
    fn tensors_lie_one_after_the_other_each_where_tensorflow_takes_it() {
        let (places, bytes, dtype) =
            places(vec![shape(1, 12), shape(1, 0), shape(1, 64), shape(1, 4)]).unwrap();
        assert_eq!(places.iter().map(|place| place.offset).collect::<Vec<_>>(), [0, 64, 64, 128]);
        assert_eq!((bytes, dtype), (132, DType::F32));
    }

    #[test]
    fn types_that_differ_or_have_no_numbers_are_refused() {
        assert!(places(vec![shape(1, 4), shape(2, 8)]).is_err());
        assert!(places(vec![shape(7, 4)]).unwrap_err().text.contains("type number 7"));
        assert!(places(Vec::new()).is_err());
    }
}
