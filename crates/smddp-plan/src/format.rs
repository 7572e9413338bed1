//! How 32-bit floats travel between nodes, where the user wants fewer bytes: rounded to 16 bits, or to 8 with a scale for each
//! group of elements.
//!
//! All formats give the same elements when they are applied to what they gave (`round(round(x)) == round(x)`), so that a
//! value can be rounded where it is made and is the same on every rank, however many links it passes.

use std::fmt;

use crate::algorithms::Algorithm;
use crate::ir::Collective;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The upper half of an f32, rounded.
    Bf16,
    /// IEEE 754 binary16: what is larger than 65,504 becomes infinite.
    F16,
    /// Whole numbers from -127 to 127 times a scale of 32 bits for each [`GROUP`] of elements.
    Int8,
}

/// Elements that have a scale in common.
pub const GROUP: usize = 256;

impl Format {
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::Int8];

    /// As settings and logs write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of so many elements that lie in a row.
    pub const fn bytes(self, elements: usize) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2 * elements,
            Self::Int8 => elements + 4 * elements.div_ceil(GROUP),
        }
    }
}

/// By which algorithm, and in which format elements travel between nodes, if not as they are.
pub type Way = (Algorithm, Option<Format>);

/// As logs and tables have it: `hier`, `hier (bf16 between nodes)`.
pub fn named((algorithm, format): Way) -> String {
    match format {
        Some(format) => format!("{} ({} between nodes)", algorithm.name(), format.name()),
        None => algorithm.name().to_owned(),
    }
}

/// Formats by collective; those that are not here send what they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats([Option<Format>; 3]);

const COLLECTIVES: [(Collective, &str); 3] = [
    (Collective::AllGather, "all_gather"),
    (Collective::ReduceScatter, "reduce_scatter"),
    (Collective::AllReduce, "all_reduce"),
];

impl Formats {
    pub fn of(&self, collective: Collective) -> Option<Format> {
        let row = COLLECTIVES.iter().position(|(known, _)| *known == collective)?;
        self.0[row]
    }

    /// `bf16` for all three, or `all_gather=bf16,reduce_scatter=int8` for those.
    ///
    /// # Errors
    /// What is wanted instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        let format = |name: &str| {
            let name = name.trim();
            Format::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name))
        };
        let wanted = || {
            "bf16, f16 or int8, or such formats by collective: all_gather=bf16,reduce_scatter=int8,all_reduce=bf16"
                .to_owned()
        };
        let mut found = Self::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            match part.split_once('=') {
                None => found.0 = [Some(format(part).ok_or_else(wanted)?); 3],
                Some((name, value)) => {
                    let named = |(_, known): &(Collective, &str)| known.eq_ignore_ascii_case(name.trim());
                    let row = COLLECTIVES.iter().position(named).ok_or_else(wanted)?;
                    found.0[row] = Some(format(value).ok_or_else(wanted)?);
                }
            }
        }
        Ok(found)
    }
}

impl fmt::Display for Formats {
    /// What means the same is written alike.
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
    fn formats_are_read_as_they_are_written() {
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
    fn a_scale_for_each_group() {
        let bytes = |elements| Format::ALL.map(|format| format.bytes(elements));
        assert_eq!(bytes(0), [0, 0, 0]);
        assert_eq!(bytes(1), [2, 2, 5]);
        assert_eq!(bytes(256), [512, 512, 260]);
        assert_eq!(bytes(257), [514, 514, 265]);
    }
}
