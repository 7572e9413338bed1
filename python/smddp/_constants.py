"""Names that several packages share."""

# The backend's name in torch.distributed.
NAME = "smddp"

# Oldest supported torch: major and minor version.
OLDEST_TORCH = (2, 8)

# The numbers of smddp_core::types::DType.
DTYPES: dict[str, int] = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
    "bool": 12,
    "complex64": 13,
    "complex128": 14,
    "complex32": 20,
}
