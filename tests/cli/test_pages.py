"""`smddp completion` and `smddp man`: generated from the parsers, for smddp and smddprun."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from smddp.launch import programs
from smddp.tools import cli, pages


def words(line: str, script: Path) -> list[str]:
    """Returns bash's completions of the last word of a command line."""
    given = line.split(" ")
    array = " ".join(map(shlex.quote, given))
    code = f"source {script}; COMP_WORDS=({array}); COMP_CWORD={len(given) - 1}; _smddp"
    done = subprocess.run(
        ["bash", "-c", f'{code}; printf "%s\\n" "${{COMPREPLY[@]}}"'], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    assert words("smddp do", script) == ["doctor"]
    assert words("smddp doctor --q", script) == ["--quick"]
    assert words("smddp launch --dry", script) == ["--dry-run"]
    assert words("/usr/bin/smddprun --tag", script) == ["--tag-output"]
    assert words("smddp completion z", script) == ["zsh"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_scripts(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "doctor" in text and "tag-output" in text and "--by-doctor" not in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "completion"
    script.write_text(text)
    assert subprocess.run([shell, "-n", script], timeout=30).returncode == 0


def test_each_command_has_a_manual_page_with_all_its_options(tmp_path: Path):
    assert cli.main(["man", "--to", str(tmp_path)]) == 0
    found = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    commands = ("info", "doctor", "status", "trace", "launch", "completion", "man")
    assert found.keys() == {"smddp", "smddprun", *(f"smddp-{name}" for name in commands)}
    for name, parser in pages.parsers(cli.parser()).items():
        text = found[name].replace("\\-", "-")
        for action in parser._actions:
            assert all(word in text for word in action.option_strings if action.help != "==SUPPRESS=="), (name, action)
    for name, text in found.items():
        assert all(f".SH {title}" in text for title in ("NAME", "SYNOPSIS", "DESCRIPTION")), name
    if shutil.which("man"):
        done = subprocess.run(
            ["man", "-l", "--warnings", tmp_path / "smddp.1"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and not done.stderr and "doctor" in done.stdout, done.stderr


def test_smddprun_accepts_each_option_that_its_pages_describe():
    for action in pages.smddprun()._actions:
        for option in action.option_strings:
            if option in ("-h", "--help", "-V", "--version"):
                with pytest.raises(SystemExit) as ended:
                    programs._parse("smddprun", [option], (), ())
                assert ended.value.code == 0
                continue
            value = {"-x": ["A=1"], "--tag-output": []}.get(option, ["2"])
            assert programs._parse("smddprun", [option, *value, "true"], (), ()).command == ["true"]
    described = {option for action in pages.smddprun()._actions for option in action.option_strings}
    assert set(re.findall(r"--?[\w-]+", programs._OPTIONS)) <= described
