"""Cases of the failure monitor from records: `python -m faults.recorded_cases RECORDS FOLDER`, from tests/.

RECORDS: folder with the files of a build with the cargo feature `record` (`crates/smddp-core/src/engine/record.rs`).
FOLDER: receives the distinct cases, with normalized times, calls, hosts and process ids. Used by `make failure-cases`.
"""

from __future__ import annotations

import argparse
import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

MS = 10**6
# Limits of the failure monitor (failure/limits.rs), in ns.
LIMITS = [ms * MS for ms in (250, 1000, 2000, 3000, 10000)]
POLL, QUERY_POLL = 1 * MS, 20 * MS
# Longest delay of an observation after its verdict was due.
MAX_DELAY = 500 * MS
MAX_BYTES = 200 * 2**10
CALLS = "all_gather reduce_scatter all_reduce broadcast reduce gather scatter all_to_all barrier".split()
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCES = ("reduce_scatter", "all_reduce", "reduce")
FAULT = re.compile(r"(?:^|; )\d+ (?:lost|left|unreachable|aborts\w*|calls leaving)\b|mismatch |differ |_error ")
SINCE = re.compile(r"(?<= since )[\d.]+")
DEADLINE = re.compile(r"(?<=deadline )[\d.]+")
CALL = re.compile(rf"\b({'|'.join(CALLS)}|leaving):0x[0-9a-f]+:\d+")
WAIT = re.compile(r"wait (\d[\d.]*)")


def ns(text: str) -> int:
    whole, _, part = text.partition(".")
    return int(whole) * MS + int(f"{part:0<6}")


@dataclass
class Step:
    """One observation.

    after: time of the observation before it; rest: no earlier observation affects it; due: time at which the verdict
    changed without an event.
    """

    at: int
    after: int
    rest: bool
    facts: str
    pending: str
    verdict: str
    due: int | None = None

    @property
    def is_late(self) -> bool:
        """Returns True for an observation that was delayed, so that its verdict states a longer time."""
        return self.due is not None and self.at - self.due > MAX_DELAY

    @property
    def inputs(self) -> tuple[str, str]:
        return self.facts, self.pending

    def times(self) -> list[int]:
        return [ns(text) for text in SINCE.findall(self.pending)]

    def durations(self) -> list[tuple[int, int]]:
        """Returns the submission time and the timeout of each call."""
        found = re.findall(r"[\w:]+ \d+ (\d[\d.]*) since ([\d.]+)", self.pending)
        return [(ns(since), ns(timeout)) for timeout, since in found]


@dataclass
class Case:
    size: int
    me: int
    steps: list[Step] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        is_kept = any(self._is_fault(step) or not step.verdict.startswith("wait") for step in self.steps)
        # The first group of a rank may have no time left, and then its first observation is a query.
        first = self.steps[0]
        is_whole = not first.verdict.startswith(("log ", "query")) or "expired " in first.pending
        return is_kept and is_whole and not any(step.is_late for step in self.steps)

    def _is_fault(self, step: Step) -> bool:
        found = FAULT.findall(step.facts)
        # All ranks leave the group in the same call.
        return any("calls leaving" not in fault for fault in found) or (
            bool(found) and not step.pending.startswith("leaving")
        )

    @property
    def order(self) -> tuple:
        """Sorts cases by their times, then by their texts."""
        return sum(step.at for step in self.steps), self.text("")

    def text(self, name: str) -> str:
        lines = [f"== {name}, {self.size} ranks, rank {self.me}"]
        for step in self.steps:
            time = f"{step.at // MS}" if step.due is None else f"due {step.at // MS}"
            lines.append(f"{time} | {step.facts} | {step.pending} -> {step.verdict}".replace("  ", " "))
        return "\n".join(lines)


def normalized_names(text: str, group: str, ranks: list[str]) -> str:
    """Replaces the name of the group, hosts, process ids, addresses, ages and the place in the program."""
    pids = {re.search(r"pid (\d+)", name)[1]: 100 + rank for rank, name in enumerate(ranks)}
    for rank, name in enumerate(ranks):
        text = text.replace(name, f"rank {rank} (host h, pid {100 + rank})")
    text = re.sub(r"host [^ ,()]+, pid (\d+)", lambda found: f"host h, pid {pids.get(found[1], found[1])}", text)
    text = text.replace(f"`{group}`", "`g`")
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+:\d+", "10.0.0.1:1000", text)
    text = re.sub(r"(?<=error, )\d+\.\d\d s before", "1.50 s before", text)
    text = re.sub(r"(\d error )[\d.]+ ", r"\g<1>1500 ", text)
    text = re.sub(r"\d+\.\d s ago", "1.0 s ago", text)
    return re.sub(r"[\w./-]*?(\w+\.py):\d+", r"\1:1", text)


def parse(path: Path) -> list[tuple[str, int, int, Step]]:
    """Returns the observations of one group with its name, the number of ranks and the rank."""
    title, *lines = path.read_text().splitlines()
    group, size, me = re.fullmatch(r"== (.*), (\d+) ranks, rank (\d+)", title).groups()
    ranks = [line[2:] for line in lines[: int(size)]]
    found, after, rest = [], 0, False
    for line in lines[int(size) :]:
        if line.startswith("# after "):
            after, rest = ns(line[8:]), False
        elif line == "# rest":
            rest = True
        elif " -> " in line:
            inputs, _, verdict = normalized_names(line, group, ranks).partition(" -> ")
            at, facts, pending = (part.strip() for part in re.split(r"(?<!\\)\|", inputs))
            found.append((group, int(size), int(me), Step(ns(at), after, rest, facts, pending, verdict)))
    return found


def cases(steps: list[tuple[str, int, int, Step]]) -> list[Case]:
    """Divides the observations of one group. A case begins where earlier observations have no effect."""
    found: list[Case] = []
    before: Step | None = None
    for _, size, me, step in steps:
        if step.rest or before is None:
            found.append(Case(size, me))
            # Time alone changed the verdict: the wait before it belongs to the case.
            if before and before.rest and depends_on_time(before, step):
                found[-1].steps.append(replace(before))
        if before and depends_on_time(before, step):
            step.due = due(before, step, found[-1])
        # The age of an error, which changes at each observation, has become equal.
        repeats = before is not None and not step.rest and before.inputs == step.inputs
        if not (repeats and before.verdict.startswith("wait") and step.verdict.startswith("wait")):
            found[-1].steps.append(step)
        before = step
    return [case for case in found if case.is_kept]


def depends_on_time(before: Step, step: Step) -> bool:
    if not before.verdict.startswith("wait") or step.verdict.startswith("wait"):
        return False
    # The engine, not the monitor, compares the deadlines of messages with the time.
    if "expired " in step.pending:
        return False
    wait = WAIT.fullmatch(before.verdict)
    announced = wait is not None and step.after < ns(wait[1]) <= step.at
    return before.inputs == step.inputs or (announced and step.verdict.startswith(("log ", "query")))


def ends(case: Case, step: Step, times: dict[int, int]) -> list[tuple[int, int]]:
    """Returns the ends of limits after `times`, as pairs of recorded and small times."""
    found = [(time + limit, small + limit) for time, small in times.items() for limit in LIMITS]
    for since, timeout in (pair for each in (*case.steps, step) for pair in each.durations()):
        if since in times:
            found.append((since + timeout, times[since] + timeout))
    return found


def due(before: Step, step: Step, case: Case) -> int:
    """Returns the time at which the verdict changed: the announced one, or the first end of a limit."""
    wait = WAIT.fullmatch(before.verdict)
    if wait and step.after < ns(wait[1]) <= step.at:
        return ns(wait[1])
    times = {each.at: 0 for each in case.steps} | dict.fromkeys(step.times(), 0)
    return min((end for end, _ in ends(case, step, times) if step.after < end <= step.at), default=step.at)


def with_canonical_calls(case: Case) -> None:
    """Replaces the fingerprints by those of calls over 5 elements, if the case has one call of that name."""
    tokens: dict[str, set[str]] = {}
    for step in case.steps:
        for found in CALL.finditer(f"{step.facts} {step.pending}"):
            tokens.setdefault(found[1], set()).add(found[0])
    for name, same in tokens.items():
        if len(same) > 1:
            continue
        described = re.compile(rf"(?<!\w){name}\(\d+ elements of [^()]*\)")
        if len({text for step in case.steps for text in described.findall(f"{step.facts} {step.verdict}")}) > 1:
            continue
        more = ", sum" if name in REDUCES else ""
        more += ", root 1" if name in ROOTED else ""
        for step in case.steps:
            step.facts, step.pending = (text.replace(next(iter(same)), name) for text in step.inputs)
            step.facts, step.verdict = (
                described.sub(f"{name}(5 elements of float32{more})", text) for text in (step.facts, step.verdict)
            )


class Clock:
    """Maps recorded times to small ones. It preserves their order, and the order of all times at which a limit ends."""

    def __init__(self, case: Case) -> None:
        first = case.steps[0]
        self.base = min([first.at, *first.times()])
        self.map = {self.base: 0}
        events = [(time, step) for step in case.steps for time in step.times()]
        events += [(step.at, step) for step in case.steps]
        for time, step in sorted(events, key=lambda event: event[0]):
            if time not in self.map:
                self.map[time] = self._small(time, step, case)

    def _small(self, time: int, step: Step, case: Case) -> int:
        before, small = max(self.map.items())
        known = ends(case, step, self.map)
        known += [(ns(text), self.deadline(ns(text))) for text in DEADLINE.findall(step.pending)]
        if step.due is not None and time == step.at:
            return next((to for end, to in known if end == step.due), small + MS)
        known = [(end, to) for end, to in known if before < end <= time and to >= small]
        return max(known)[1] if known else small + MS

    def deadline(self, time: int) -> int:
        """Returns a deadline of messages in whole seconds; they were sent shortly before the first observation."""
        second = 1000 * MS
        return (time - self.base + second - 1) // second * second

    def until(self, step: Step, time: int, steps: list[Step]) -> int:
        """Maps the end of a wait, which is a recorded time plus a limit."""
        if time in map(ns, DEADLINE.findall(step.pending)):
            return self.deadline(time)
        limits = [POLL, QUERY_POLL, *LIMITS, *(timeout for each in steps for _, timeout in each.durations())]
        for before, small in sorted(self.map.items(), reverse=True):
            if time - before in limits:
                return small + time - before
        # A query is repeated after as long as it lasts.
        for begun, small in self.map.items():
            if time - step.at == step.at - begun:
                at = self.map[step.at]
                return at + min(max(at - small, POLL), QUERY_POLL)
        return time


def with_small_times(case: Case) -> None:
    clock = Clock(case)
    steps = [replace(step) for step in case.steps]
    for step, recorded in zip(case.steps, steps, strict=True):
        step.at = clock.map[recorded.at]
        since = SINCE.sub(lambda found: str(clock.map[ns(found[0])] // MS), recorded.pending)
        since = since.replace(" since 0", "") if not re.search(r" since 0\d", since) else since
        step.pending = DEADLINE.sub(lambda found: str(clock.deadline(ns(found[0])) // MS), since)
        if found := WAIT.fullmatch(recorded.verdict):
            step.verdict = f"wait {clock.until(recorded, ns(found[1]), steps) // MS}"


def key(case: Case) -> tuple:
    """Returns the parts in which distinct cases differ: the kinds of the facts, of the pending operations and of the
    verdicts. Numbers, and the names of calls without a root, are not among them."""
    steps = []
    for step in case.steps:
        words = [re.split(r"(?<!\\);", plain(text)) for text in step.inputs]
        facts, pending = (frozenset(word.strip() for word in part) for part in words)
        steps.append((step.due is None, facts, pending, plain(step.verdict)))
    return case.size, tuple(steps)


def plain(text: str) -> str:
    """Removes numbers and arguments of calls, and replaces the names of calls by two classes."""
    text = CALL.sub(lambda found: found[1], text)
    names = "|".join(sorted(CALLS, key=len, reverse=True))
    text = re.sub(rf"\b({names})\b(\([^()]*\))?", lambda found: "rooted" if found[1] in ROOTED else "call", text)
    return re.sub(r"\d+|elements of \w+", "", text)


def kind(case: Case) -> str:
    """Returns the name of the file for a case: its first fault."""
    facts = " ; ".join(step.facts for step in case.steps)
    pending = case.steps[-1].pending
    kinds = {"mismatches": "mismatch |differ ", "errors": "_error ", "lost": r"\d lost ", "unreachable": "unreachable"}
    kinds |= {"reports": r"\d aborts", "departures": r"\d left|calls leaving"}
    found = next((name for name, words in kinds.items() if re.search(words, facts)), "timeouts")
    return "leaving" if pending.startswith("leaving") else found


def chosen(cases: list[Case], most: int) -> list[Case]:
    """Returns at most `most` cases: round-robin over the last verdicts, short cases first."""
    groups: dict[tuple, list[Case]] = {}
    for case in sorted(cases, key=lambda case: (len(case.text("")), case.text(""))):
        groups.setdefault((kind(case), case.size, plain(case.steps[-1].verdict)), []).append(case)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return list(itertools.islice(filter(None, turns), most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=150, help="largest number of cases")
    given = parser.parse_args()
    found: dict[tuple, Case] = {}
    count = 0
    for path in sorted(given.records.glob("*.txt")):
        for case in cases(parse(path)):
            count += 1
            with_canonical_calls(case)
            with_small_times(case)
            known = found.get(key(case))
            if known is None or case.order < known.order:
                found[key(case)] = case
    files: dict[str, list[str]] = {}
    written = chosen(list(found.values()), given.most)
    for case in sorted(written, key=lambda case: case.text("")):
        texts = files.setdefault(kind(case), [])
        texts.append(case.text(f"{kind(case)} {len(texts) + 1}"))
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("*.txt"):
        old.unlink()
    head = "# Recorded during faults and mismatched calls. `make failure-cases` writes this file again.\n\n"
    for name, texts in files.items():
        (given.folder / f"{name}.txt").write_text(head + "\n\n".join(texts) + "\n")
    size = sum(path.stat().st_size for path in given.folder.glob("*.txt"))
    print(f"{count} recorded cases, {len(found)} distinct, {len(written)} written, {size} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"the cases have more than {MAX_BYTES} bytes: choose a smaller --most")


if __name__ == "__main__":
    main()
