#!/bin/sh
# Names every missing prerequisite with the command that installs it; silent and 0 when all is there.
# Commands are for Debian and Ubuntu; Rust comes from rustup.
set -u
python=${PYTHON:-python3}
missing=0

lacks() { # WHAT COMMAND
    printf 'missing: %s\n    install it with: %s\n' "$1" "$2" >&2
    missing=1
}

# True when version $1 is at least $2 (two numbers, MAJOR.MINOR).
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$2" ]
}

apt='apt-get update && apt-get install -y'
[ "$(id -u)" = 0 ] || apt='sudo apt-get update && sudo apt-get install -y'

case "$(uname -s)-$(uname -m)" in
Linux-x86_64 | Linux-aarch64) ;;
*) lacks "Linux on x86-64 or aarch64 (this is $(uname -s) on $(uname -m))" \
    "another machine; no other platform is supported yet" ;;
esac

rustup="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
if ! command -v cargo >/dev/null 2>&1 || ! command -v rustc >/dev/null 2>&1; then
    command -v curl >/dev/null 2>&1 || lacks "curl, which fetches rustup" "$apt curl ca-certificates"
    lacks "cargo and rustc (Rust 1.88 or later)" "$rustup"
elif ! found=$(rustc --version 2>/dev/null); then
    lacks "a working rustc ('rustc --version' failed)" "rustup default stable"
else
    found=$(echo "$found" | cut -d' ' -f2)
    if ! at_least "$found" 1.88; then
        if command -v rustup >/dev/null 2>&1; then update="rustup update stable"; else update=$rustup; fi
        lacks "Rust 1.88 or later (found $found)" "$update"
    fi
fi

command -v cc >/dev/null 2>&1 || lacks "a C compiler (cc)" "$apt gcc libc6-dev"
command -v make >/dev/null 2>&1 || lacks "make" "$apt make"

if ! found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    lacks "$python (Python 3.10 or later)" "$apt python3 python3-venv"
else
    if ! at_least "$found" 3.10; then
        lacks "Python 3.10 or later ($python is $found)" "$apt python3.11 python3.11-venv   # then: make PYTHON=python3.11"
    elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        lacks "Python's venv and ensurepip modules" "$apt python$found-venv"
    fi
fi

exit $missing
