#!/usr/bin/env bash
# Holds what would be published against what indexes, installers and readers expect; `make check-package` calls it with
# its tools on the path.
#
#   scripts/check-package.sh SDIST WHEEL...
set -euo pipefail
sdist=$(realpath "$1")
shift
mapfile -t wheels < <(realpath "$@")
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

step() { printf '\n== %s\n' "$*"; }

step "the metadata (twine, pyroma)"
twine check --strict "${wheels[@]}" "$sdist"
pyroma --min 10 "$sdist"

step "the stable ABI (abi3audit)"
for wheel in "${wheels[@]}"; do
    python scripts/check_abi.py "$wheel"
done

step "the wheels' own tests"
for wheel in "${wheels[@]}"; do
    WHEEL=$wheel python -m pytest -q tests/wheel
done
python -m pytest -q tests/source/test_licences.py tests/source/test_publishing.py

step "the bill of materials (CycloneDX's schema)"
for wheel in "${wheels[@]}"; do
    mkdir -p "$scratch/bills/${wheel##*_}"
    unzip -q "$wheel" '*.dist-info/sboms/*' -d "$scratch/bills/${wheel##*_}"
done
for bill in "$scratch"/bills/*/*.dist-info/sboms/*; do
    python - "$bill" <<'PYTHON'
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

wrong = JsonStrictValidator(SchemaVersion.V1_5).validate_str(Path(sys.argv[1]).read_text())
sys.exit(f"{sys.argv[1]}: {wrong}" if wrong else 0)
PYTHON
    echo "${bill##*/} is valid"
done

step "the forms and workflows (their schemas)"
check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,idea}.yml
check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

step "licences, sources and duplicates of all crates (cargo deny)"
cargo deny check --hide-inclusion-graph licenses bans sources
# The one check that needs GitHub.
if timeout 60 git ls-remote --quiet https://github.com/RustSec/advisory-db HEAD >/dev/null 2>&1; then
    cargo deny check advisories
elif [ -n "${CI:-}" ]; then
    echo "the RustSec database on GitHub cannot be reached" >&2
    exit 1
else
    echo "NOT CHECKED: advisories, for the RustSec database on GitHub cannot be reached"
fi

step "the same bytes from the source distribution, in another folder with another Cargo home"
mkdir -p "$scratch/source" "$scratch/cargo"
tar -xzf "$sdist" -C "$scratch/source" --strip-components 1
# What is downloaded already is not downloaded again.
mkdir -p "${CARGO_HOME:-$HOME/.cargo}/registry"
ln -s "${CARGO_HOME:-$HOME/.cargo}/registry" "$scratch/cargo/registry"
for wheel in "${wheels[@]}"; do
    target=$(sed -E 's/.*manylinux_[0-9]+_[0-9]+_(.*)\.whl/\1-unknown-linux-gnu/' <<<"$wheel")
    SOURCE=$scratch/source RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup} CARGO_HOME=$scratch/cargo CARGO_TARGET_DIR=$scratch/target \
        bash scripts/build-wheel.sh "$scratch/out" --portable "$target" --interpreter "$(command -v python)"
    again=$scratch/out/${wheel##*/}
    if ! cmp "$wheel" "$again"; then
        diff <(unzip -v "$wheel") <(unzip -v "$again") || true
        exit 1
    fi
done
sha256sum "${wheels[@]}" "$sdist"
