//! Compression of 32-bit floats between nodes: rounding to 16 bits, or to 8 bits with one scale per group of
//! elements.
//!
//! All formats are idempotent (`round(round(x)) == round(x)`). The producer can therefore round a value, and
//! every rank receives the same bits, independent of the number of links.

use std::fmt;

use crate::algorithms::Algorithm;
use crate::ir::Collective;

/// Format of 32-bit floats between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The upper 16 bits of an f32, rounded.
    Bf16,
    /// IEEE 754 binary16; magnitudes above 65,504 become infinite.
    F16,
    /// Integers from -127 to 127, multiplied by one 32-bit scale per [`GROUP`] elements.
    Int8,
}

/// Elements per scale.
pub const GROUP: usize = 256;

impl Format {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::Int8];

    /// Returns the name used in settings and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        }
    }

    /// Returns the encoded size in bytes of `elements` consecutive elements.
    pub const fn bytes(self, elements: usize) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2 * elements,
            Self::Int8 => elements + 4 * elements.div_ceil(GROUP),
        }
    }
}

/// Algorithm, and the format of elements between nodes; `None` sends them unchanged.
pub type AlgorithmVariant = (Algorithm, Option<Format>);

/// Returns the name for logs and tables: `hier`, `hier (bf16 between nodes)`.
pub fn variant_name((algorithm, format): AlgorithmVariant) -> String {
    match format {
        Some(format) => format!("{} ({} between nodes)", algorithm.name(), format.name()),
        None => algorithm.name().to_owned(),
    }
}

/// Formats by collective; other collectives send elements unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats([Option<Format>; 3]);

const COLLECTIVES: [(Collective, &str); 3] = [
    (Collective::AllGather, "all_gather"),
    (Collective::ReduceScatter, "reduce_scatter"),
    (Collective::AllReduce, "all_reduce"),
];

impl Formats {
    /// Returns the format for a collective. `None` sends elements unchanged.
    pub fn of(&self, collective: Collective) -> Option<Format> {
        let row = COLLECTIVES.iter().position(|(known, _)| *known == collective)?;
        self.0[row]
    }

    /// Parses `bf16` (all three collectives) or `all_gather=bf16,reduce_scatter=int8`.
    ///
    /// # Errors
    /// Returns a description of the expected syntax.
    pub fn parse(text: &str) -> Result<Self, String> {
        let format = |name: &str| {
            let name = name.trim();
            Format::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name))
        };
        let expected = || {
            "bf16, f16 or int8, or one of them per collective: all_gather=bf16,reduce_scatter=int8,all_reduce=bf16"
                .to_owned()
        };
        let mut found = Self::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            match part.split_once('=') {
                None => found.0 = [Some(format(part).ok_or_else(expected)?); 3],
                Some((name, value)) => {
                    let matches = |(_, known): &(Collective, &str)| known.eq_ignore_ascii_case(name.trim());
                    let row = COLLECTIVES.iter().position(matches).ok_or_else(expected)?;
                    found.0[row] = Some(format(value).ok_or_else(expected)?);
                }
            }
        }
        Ok(found)
    }
}

impl fmt::Display for Formats {
    /// Equivalent settings have the same text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = COLLECTIVES.iter().zip(self.0);
        let rows: Vec<String> =
            rows.filter_map(|((_, name), format)| Some(format!("{name}={}", format?.name()))).collect();
        f.write_str(&rows.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_formats_round_trip() {
        for (text, written) in [
            ("", ""),
            ("BF16", "all_gather=bf16,reduce_scatter=bf16,all_reduce=bf16"),
            (" reduce_scatter = int8 , all_gather=f16", "all_gather=f16,reduce_scatter=int8"),
            ("bf16,reduce_scatter=int8", "all_gather=bf16,reduce_scatter=int8,all_reduce=bf16"),
        ] {
            let read = Formats::parse(text).unwrap();
            assert_eq!(read.to_string(), written);
            assert_eq!(Formats::parse(written).unwrap(), read);
        }
        for text in ["fp8", "broadcast=bf16", "all_gather=", "all_gather"] {
            assert!(Formats::parse(text).unwrap_err().contains("int8"), "{text}");
        }
        assert_eq!(Formats::parse("f16").unwrap().of(Collective::Broadcast), None);
    }

    #[test]
    fn encoded_size_includes_one_scale_per_group() {
        let bytes = |elements| Format::ALL.map(|format| format.bytes(elements));
        assert_eq!(bytes(0), [0, 0, 0]);
        assert_eq!(bytes(1), [2, 2, 5]);
        assert_eq!(bytes(256), [512, 512, 260]);
        assert_eq!(bytes(257), [514, 514, 265]);
    }
}
