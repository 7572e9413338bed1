"""docs/reference/settings.md: every `SMDDP_*` variable with its type, default and allowed values.

Names, defaults and descriptions are those of the native module, which `smddp info` prints. The scope of a setting is
read from the table in `crates/smddp-core/src/config/mod.rs`. `PRODUCTION` and `TUNING` add groups, types and guides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import writer

SOURCE = "crates/smddp-core/src/config/mod.rs"
#: Release that first had the settings; a newer setting names its own.
FIRST_RELEASE = "0.1.0"
_ROW = re.compile(r'^    (SMDDP_\w+) = "[^"]*", (shared|own), ', re.M)
_PAGE = re.compile(r"\s*\(docs/([\w/.-]+\.md)\)")
_BYTES = "bytes; K, M and G allowed"

#: Titles of pages that entries link to.
GUIDES = {
    "guides/network.md": "Network",
    "guides/secure-a-job.md": "Secure a job",
    "guides/fault-tolerance.md": "Fault tolerance",
    "guides/debug-a-hang.md": "Debug a hang",
    "guides/slow-job.md": "Diagnose a slow job",
    "guides/monitoring.md": "Monitoring",
    "guides/traces-and-replay.md": "Record, trace and replay a job",
    "guides/determinism.md": "Determinism",
    "guides/compression.md": "Compression",
    "guides/gpu.md": "CUDA tensors",
    "guides/tune.md": "Tune performance",
    "reliability.md": "Reliability",
    "security.md": "Security",
}


@dataclass(frozen=True)
class Fact:
    """Properties of a setting that the native module does not have."""

    type: str
    allowed: str
    guide: str
    since: str = FIRST_RELEASE


_SWITCH = "`0`, `1`"
_PATH = "path"

PRODUCTION: dict[str, dict[str, Fact]] = {
    "Network": {
        "SMDDP_TRANSPORT": Fact("word", "`auto`, `efa`, `tcp`, `fabric:PROVIDER`, `shm`", "guides/network.md"),
        "SMDDP_SOCKET_IFNAME": Fact("interface names", "prefixes, `=NAME`, `^NAME`", "guides/network.md"),
        "SMDDP_SOCKET_FAMILY": Fact("word", "`AF_INET`, `AF_INET6`", "guides/network.md"),
        "SMDDP_LIBFABRIC": Fact(_PATH, "a shared library", "guides/network.md"),
    },
    "Security": {
        "SMDDP_JOB_TOKEN_FILE": Fact(_PATH, "a file of 32 bytes or more", "guides/secure-a-job.md"),
        "SMDDP_ENCRYPT": Fact("switch", _SWITCH, "guides/secure-a-job.md"),
    },
    "Failure detection": {
        "SMDDP_PEER_TIMEOUT": Fact("seconds", "1 or more", "guides/fault-tolerance.md"),
        "SMDDP_LEAVE_SECONDS": Fact("seconds", "0 or more", "guides/fault-tolerance.md"),
        "SMDDP_DEADLOCK": Fact("word", "`report`, `error`, `off`", "guides/debug-a-hang.md"),
        "SMDDP_AUDIT": Fact("words", "`wire`, `results`, `results:N`", "guides/fault-tolerance.md"),
        "SMDDP_STACKS": Fact("switch", _SWITCH, "guides/debug-a-hang.md"),
    },
    "Logging and recorder": {
        "SMDDP_DEBUG": Fact("word", "`NONE`, `VERSION`, `WARN`, `INFO`, `TRACE`", "guides/monitoring.md"),
        "SMDDP_DEBUG_FILE": Fact(_PATH, "with `%h`, `%p`", "guides/monitoring.md"),
        "SMDDP_RECORDER": Fact("operations", "0 to 1048576", "guides/traces-and-replay.md"),
        "SMDDP_DUMP_DIR": Fact(_PATH, "a folder", "guides/traces-and-replay.md"),
        "SMDDP_STRAGGLERS": Fact("switch", _SWITCH, "guides/slow-job.md"),
    },
    "Metrics": {
        "SMDDP_METRICS_PORT": Fact("port", "`PORT`, `ADDRESS:PORT`, `0`", "guides/monitoring.md"),
        "SMDDP_METRICS_FILE": Fact(_PATH, "with `%h`, `%p`, `%r`", "guides/monitoring.md"),
        "SMDDP_METRICS_INTERVAL": Fact("seconds", "1 or more", "guides/monitoring.md"),
    },
    "Numerical results": {
        "SMDDP_CANONICAL_ORDER": Fact("word", "`auto`, `0`, `1`", "guides/determinism.md"),
        "SMDDP_WIRE_FORMAT": Fact("words", "`bf16`, `f16`, `int8`, `COLLECTIVE=FORMAT`", "guides/compression.md"),
    },
    "GPU": {
        "SMDDP_CUDA_PATH": Fact("word", "`auto`, `ipc`, `host`", "guides/gpu.md"),
        "SMDDP_CUDA_SMS": Fact("SMs", "1 to 64", "guides/gpu.md"),
        "SMDDP_CUDA_LIBRARY": Fact(_PATH, "a shared library", "guides/gpu.md"),
    },
    "Memory and threads": {
        "SMDDP_STAGING_BYTES": Fact(_BYTES, "64K to 1024G", "guides/tune.md"),
        "SMDDP_THREADS": Fact("threads", "1 to 64", "guides/tune.md"),
    },
}
TUNING: dict[str, Fact] = {
    "SMDDP_ALGO": Fact("word", "name of an algorithm", "guides/tune.md"),
    "SMDDP_TUNE": Fact("table or path", "`COLLECTIVE:SIZES:@ALGORITHM`", "guides/tune.md"),
    "SMDDP_SEGMENT_BYTES": Fact(_BYTES, "64 to 1024G", "guides/tune.md"),
    "SMDDP_NETWORK": Fact(
        "word or numbers", "`measure`, `default`, `latency_us=`, `message_us=`, `gbit=`", "guides/tune.md"
    ),
    "SMDDP_STREAM_BYTES": Fact(_BYTES, "0 to 1024G", "guides/tune.md"),
    "SMDDP_SPIN_US": Fact("microseconds", "0 or more", "guides/tune.md"),
    "SMDDP_SINGLE_COPY": Fact("word", "`auto`, `0`, `1`", "guides/tune.md"),
    "SMDDP_NODE": Fact("name", "with `%r`", "guides/network.md"),
}

HEAD = """Environment variables, read once per process. Set them for all ranks, for example
`SMDDP_DEBUG=INFO torchrun --nproc-per-node 4 script.py`.

```console
$ SMDDP_DEBUG=INFO smddp info
...
settings: value (source), and description
...
  SMDDP_DEBUG                 INFO (environment): log level on standard error: ...
...
```

`smddp info` prints each setting with its value and the source of the value. A misspelt `SMDDP_*`
name logs a warning with the nearest setting. An invalid value is an error. An empty value counts
as unset. In values, `%h` is the host, `%p` the process ID, `%r` the rank.

"""
DEPRECATED = """## Deprecated settings

A deprecated name sets the setting that replaces it, with one warning. If the two contradict each
other, it is an error.

"""


def facts() -> dict[str, Fact]:
    """Returns the properties of all settings by name."""
    return {**{name: fact for group in PRODUCTION.values() for name, fact in group.items()}, **TUNING}


def scopes() -> dict[str, bool]:
    """Returns true for each setting that all ranks must share."""
    rows = _ROW.findall((writer.ROOT / SOURCE).read_text(encoding="utf-8"))
    return {name: scope == "shared" for name, scope in rows}


def _entry(name: str, default: str, text: str, fact: Fact, shared: bool) -> str:
    guides = [fact.guide, *(path for path in _PAGE.findall(text) if path in GUIDES)]
    words = re.sub(r"(?<![`\w])SMDDP_[A-Z_]+\b", lambda match: f"[{match[0]}](#{match[0]})", _PAGE.sub("", text))
    row = {
        "type": fact.type,
        "default": writer.code(default),
        "allowed": fact.allowed,
        "equal on all ranks": "yes" if shared else "no",
        "since": fact.since,
    }
    see = " · ".join(f"[{GUIDES[path]}](../{path})" for path in dict.fromkeys(guides))
    return writer.entry(name, writer.sentence(words), row, [f"See: {see}"])


def page() -> str:
    from smddp import _core

    rows = {name: (default, text) for name, _value, default, _source, text in _core.settings()}
    shared, known = scopes(), facts()
    if not rows.keys() == known.keys() == shared.keys():
        differing = sorted((rows.keys() | known.keys() | shared.keys()) - (rows.keys() & known.keys() & shared.keys()))
        raise SystemExit(f"scripts/docs/settings.py: give the group and the type of {', '.join(differing)}")

    def entries(group: dict[str, Fact]) -> str:
        return "".join(_entry(name, *rows[name], fact, shared[name]) for name, fact in group.items())

    parts = [HEAD, *(f"## {title}\n\n{entries(group)}" for title, group in PRODUCTION.items())]
    parts.append("## Tuning and debugging only\n\n")
    parts.append(writer.paragraph("Settings for measurements and tests. Leave them unset in production."))
    parts.append(entries(TUNING) + DEPRECATED)
    parts.append(
        writer.table(
            ("variable", "replaced by", "equivalent values (old: new)"),
            [
                [f'<a id="{name}"></a>`{name}`', f"[{new}](#{new})", text]
                for name, new, text in _core.deprecated_settings()
            ],
        )
    )
    parts.append(writer.links(("Check machines and links", "../guides/check-a-machine.md"), ("Reference", "index.md")))
    return writer.page("Settings: SMDDP_* environment variables", SOURCE, *parts)
