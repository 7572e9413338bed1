"""`smddp.log_to`: the log as records of Python's logging."""

import subprocess
import sys

import pytest
import smddp
from ranks.launching import clean

SCRIPT = """
import logging, os, sys
import smddp

logging.basicConfig(level=logging.{level}, format="%(levelname)s|%(name)s|%(message)s", stream=sys.stdout)
smddp.log_to({name})
from smddp.observability.log import info, warning
{body}
"""


def logged(level: str = "INFO", name: str = "", body: str = "", **settings: str) -> tuple[list[str], str]:
    """Returns the lines of the records, and standard error."""
    script = SCRIPT.format(level=level, name=name, body=body)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**clean(), **settings}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_lines_are_records_to_the_last_one_before_the_exit_and_not_on_standard_error():
    lines, errors = logged(body="for i in range(500): info(f'fact {i}')\nwarning('wrong')")
    assert lines == [*(f"INFO|smddp|fact {i}" for i in range(500)), "WARNING|smddp|wrong"]
    assert errors == ""


def test_a_loggers_level_and_name_count():
    assert logged("WARNING", "'trainer.smddp'", "info('fact')\nwarning('wrong')")[0] == ["WARNING|trainer.smddp|wrong"]
    assert logged("INFO", "logging.getLogger('mine')", "info('fact')")[0] == ["INFO|mine|fact"]


def test_core_lines_keep_their_level():
    body = "import numpy\nwith smddp.init() as comm: comm.all_reduce(numpy.ones(3))"
    lines, errors = logged("DEBUG", body=body)
    assert any(line.startswith("INFO|smddp|") and "group" in line for line in lines), (lines, errors)
    assert not errors, errors


def test_latest_logger_receives_lines_and_a_forked_child_uses_standard_error():
    body = """
info("first")
smddp.log_to("second")
info("fact")
child = os.fork()
if child == 0:
    warning("of a child")
    os._exit(0)
os.waitpid(child, 0)
"""
    lines, errors = logged(body=body)
    assert lines == ["INFO|smddp|first", "INFO|second|fact"]
    assert "SMDDP WARN of a child" in errors


def test_invalid_logger_is_rejected():
    with pytest.raises(TypeError, match="not 5"):
        smddp.log_to(5)


def test_a_full_log_file_is_reported_once_and_lines_go_to_standard_error():
    script = "from smddp.observability.log import info\nfor i in range(3): info(f'fact {i}')"
    settings = {"SMDDP_DEBUG": "INFO", "SMDDP_DEBUG_FILE": "/dev/full"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**clean(), **settings}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SMDDP_DEBUG_FILE /dev/full") == 1, done.stderr
    assert [f"fact {i}" in done.stderr for i in range(3)] == [True] * 3, done.stderr
