"""Recorded observations become short, normalized cases."""

from pathlib import Path

from faults import recorded_cases

FOLDER = Path(__file__).parents[2] / "crates/smddp-core/src/failure/tests/recorded"
CALL = "all_reduce:0x9d1ffff000002:5000"
RECORD = f"""\
== 7, 3 ranks, rank 2
# rank 0 (host vm, pid 812)
# rank 1 (host vm, pid 813)
# rank 2 (host vm, pid 814)
# after 10.000000
# rest
90.250000 | 1 missing | {CALL} 3 3000 since 80.000000 -> wait 2080
# after 1900.000000
# rest
2080.500000 | 1 missing | {CALL} 3 3000 since 80.000000 -> log all_reduce #3 on group `7` has waited for 2 s; missing: \
rank 1 (host vm, pid 813)
# after 2080.500000
2080.500000 | 1 missing | {CALL} 3 3000 since 80.000000 -> wait 3080
# after 2700.000000
2900.125000 | 1 lost 0 died\\; see 10.1.2.3:4567; 1 missing | {CALL} 3 3000 since 80.000000 -> fail all_reduce(5000 \
elements of float32, sum) rank 1 (host vm, pid 813) died; see 10.1.2.3:4567
"""
CASES = """\
== name, 3 ranks, rank 2
1 | 1 missing | all_reduce 3 3000 -> wait 2000
due 2000 | 1 missing | all_reduce 3 3000 -> log all_reduce #3 on group `g` has waited for 2 s; missing: rank 1 \
(host h, pid 101)
2000 | 1 missing | all_reduce 3 3000 -> wait 3000
2250 | 1 lost 0 died\\; see 10.0.0.1:1000; 1 missing | all_reduce 3 3000 -> fail all_reduce(5 elements of float32, \
sum) rank 1 (host h, pid 101) died; see 10.0.0.1:1000"""


def written(tmp_path: Path, record: str) -> list[str]:
    path = tmp_path / "1-0.txt"
    path.write_text(record)
    found = recorded_cases.cases(recorded_cases.parse(path))
    for case in found:
        recorded_cases.with_canonical_calls(case)
        recorded_cases.with_small_times(case)
    return [case.text("name") for case in found]


def test_times_calls_and_names_are_normalized(tmp_path):
    assert written(tmp_path, RECORD) == [CASES]


def test_observations_without_faults_are_left_out(tmp_path):
    assert written(tmp_path, "".join(RECORD.splitlines(keepends=True)[:7])) == []


def test_delayed_observations_are_left_out(tmp_path):
    assert written(tmp_path, RECORD.replace("\n2080.5", "\n2780.5").replace("after 2080.5", "after 2780.5")) == []


def test_the_recorded_files_are_small():
    files = list(FOLDER.glob("*.txt"))
    assert files
    assert sum(file.stat().st_size for file in files) <= recorded_cases.MAX_BYTES
