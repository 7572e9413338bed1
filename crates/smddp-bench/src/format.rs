//! Number formats of nccl-tests.

/// Formats a figure in `width` columns: with two decimals, with fewer for larger values, or with an exponent.
pub(crate) fn figure(value: f64, width: usize) -> String {
    for decimals in [2, 1, 0] {
        let text = format!("{value:.decimals$}");
        if text.len() <= width {
            return format!("{text:>width$}");
        }
    }
    format!("{:>width$}", exponent(value, usize::from(width >= 7)))
}

/// Formats as C's `%.{decimals}e`: the exponent has a sign and at least two digits.
fn exponent(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$e}");
    let Some((mantissa, power)) = text.split_once('e') else {
        return text;
    };
    let (sign, digits) = match power.strip_prefix('-') {
        Some(digits) => ('-', digits),
        None => ('+', power),
    };
    format!("{mantissa}e{sign}{digits:0>2}")
}

/// Formats as C's `%g`: six significant digits, no trailing zeros, an exponent for very large or small values.
pub(crate) fn general(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return if value == 0.0 { "0".into() } else { format!("{value}").to_lowercase() };
    }
    // The exponent after rounding to six digits determines the form.
    let rounded = format!("{value:.5e}");
    let power: i32 = rounded.split_once('e').and_then(|(_, p)| p.parse().ok()).unwrap_or(0);
    if !(-4..6).contains(&power) {
        let text = exponent(value, 5);
        return match text.split_once('e') {
            Some((mantissa, power)) => format!("{}e{power}", without_zeros(mantissa)),
            None => text,
        };
    }
    let decimals = usize::try_from(5 - power).unwrap_or(0);
    without_zeros(&format!("{value:.decimals$}")).into()
}

fn without_zeros(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_figures_have_fewer_decimals() {
        for (value, want) in [
            (0.0, "   0.00"),
            (9.876, "   9.88"),
            (1234.56, "1234.56"),
            (9999.994, "9999.99"),
            (9999.999, "10000.0"),
            (12345.67, "12345.7"),
            (123456.7, " 123457"),
            (1234567.0, "1234567"),
            (12345678.0, "1.2e+07"),
        ] {
            assert_eq!(figure(value, 7), want);
        }
        for (value, want) in [
            (123.456, "123.46"),
            (1234.56, "1234.6"),
            (12345.6, " 12346"),
            (999999.0, "999999"),
            (12345678.0, " 1e+07"),
        ] {
            assert_eq!(figure(value, 6), want);
        }
    }

    #[test]
    fn general_matches_printf_g() {
        for (value, want) in [
            (0.0, "0"),
            (110.83, "110.83"),
            (52.97531, "52.9753"),
            (9.048_53, "9.04853"),
            (135.0936, "135.094"),
            (0.0001234567, "0.000123457"),
            (0.00001234567, "1.23457e-05"),
            (1234567.0, "1.23457e+06"),
            (999999.6, "1e+06"),
            (123456.0, "123456"),
            (3.0, "3"),
        ] {
            assert_eq!(general(value), want);
        }
    }
}
