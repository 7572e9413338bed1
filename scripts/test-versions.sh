#!/usr/bin/env bash
# Installs the one wheel in dist/ beside each version of a framework that is asked for, runs a folder of tests there and
# prints the counts as a Markdown table (also left in dist/PACKAGE-versions.md).
#
#   scripts/test-versions.sh torch "2.8.* 2.11.* newest" tests/backend
#   scripts/test-versions.sh tensorflow-cpu "2.12.* 2.15.* newest" tests/tf [PYTEST ARGUMENTS]
#
# Without a folder the environment is made, and nothing more.
#
# Each version gets a virtual environment of its own, .venvs/PACKAGE-VERSION (torch's about 5 GB). An older one does not
# take every new Python: the first of $PYTHON and python3.13 ... python3.10 that pip can install it for is used.
set -euo pipefail
cd "$(dirname "$0")/.."

package=$1 versions=$2
shift 2
wheel=$(ls dist/smddp-*.whl)
pythons="${PYTHON:-python3} python3.13 python3.12 python3.11 python3.10"
table=dist/$package-versions.md

# Makes the environment $1 with the requirement $2, or says why it cannot be had.
prepare() {
    local home=$1 requirement=$2 python
    [ -e "$home/.ready" ] && return
    for python in $pythons; do
        command -v "$python" >/dev/null && "$python" -c 'import venv, ensurepip' 2>/dev/null || continue
        rm -rf "$home"
        "$python" -m venv "$home"
        "$home/bin/python" -m pip install --quiet --upgrade pip
        # The dry run asks whether this Python is taken at all; a failure of the real one is an error.
        "$home/bin/python" -m pip install --quiet --dry-run --no-deps "$requirement" 2>/dev/null || continue
        echo "# $home: installing $requirement for $("$home/bin/python" --version)"
        "$home/bin/python" -m pip install --quiet "$requirement" numpy setuptools \
            pytest pytest-timeout pytest-xdist pytest-rerunfailures hypothesis expecttest
        touch "$home/.ready"
        return
    done
    echo "none of these takes $requirement: $pythons" >&2
    return 1
}

{
    echo "| $package | Python | passed | failed | skipped | seconds |"
    echo "|---|---|---|---|---|---|"
} >"$table"

failed=0
set -f # the versions hold stars
for version in $versions; do
    requirement=$package
    [ "$version" = newest ] || requirement="$package==$version"
    home=.venvs/$package-${version//[^0-9a-z.]/x}
    prepare "$home" "$requirement"
    "$home/bin/python" -m pip install --quiet --force-reinstall --no-deps "$wheel"
    [ $# -gt 0 ] || continue
    report=$home/report.xml
    rm -f "$report"
    "$home/bin/python" -m pytest --reruns 1 -raR --junitxml "$report" "$@" || failed=1
    "$home/bin/python" scripts/junit_row.py "$package" "$report" >>"$table" || failed=1
done

echo
echo "wheel: $(basename "$wheel")"
cat "$table"
exit $failed
