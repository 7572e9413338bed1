"""The code of a job: folders that contain the jobs, Git repositories, shell scripts; names that torchrun has, too."""

import base64
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from smddp.estimator import PyTorch, TensorFlow, repository, shell
from test_outside_text import by_torchx

ON = {"enabled": True}
SHELL = '#!/bin/sh\nprintf "%s|" "$@" > "$SM_MODEL_DIR/arguments"\npwd > "$SM_MODEL_DIR/folder"\n'
SAYS = "import os, pathlib\npathlib.Path(os.environ['SM_MODEL_DIR'], 'said').write_text({!r})\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return Path(name)


def run(entry_point: str, kind=PyTorch, fit=None, **given) -> Path:
    """Runs a job of one rank. Returns its folder."""
    base = {"framework_version": "2", "py_version": "py310", "instance_type": "local", "instance_count": 1}
    made = kind(entry_point=entry_point, **{**base, **given})
    made.fit(logs=False, **(fit or {}))
    return made.latest_training_job.folder


# ---- copies ----


@pytest.mark.parametrize(
    ("source_dir", "output_path"),
    [(".", None), ("./", None), ("../{here}", None), (".", "."), (".", "deep/down"), ("link", None)],
)
def test_the_code_never_contains_jobs(place, source_dir, output_path):
    write("train.py", SAYS.format("right"))
    write("lib/help.py", "")
    Path("up").symlink_to("..")
    Path("jobs-link").symlink_to("smddp-jobs")
    Path("link").symlink_to(".")
    for name in ("one", "two"):
        folder = run(
            "train.py",
            source_dir=source_dir.format(here=place.name),
            output_path=output_path,
            dependencies=["."],
            fit={"job_name": name},
        )
        copied = [path.relative_to(folder / "code") for path in (folder / "code").rglob("*.json")]
        assert copied == [] and (folder / "model/said").read_text() == "right"
        assert (folder / "code/lib/help.py").exists() and (folder / "code" / place.name / "train.py").exists()


# ---- Git ----


def git(*words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd="repo", check=True, capture_output=True)


@pytest.fixture
def repo(place) -> str:
    write("repo/code/train.py", SAYS.format("main"))
    git("init")
    git("add", "-A")
    git("commit", "-m", "1")
    git("tag", "first")
    git("checkout", "-b", "team/exp")
    write("repo/code/train.py", SAYS.format("branch"))
    git("commit", "-am", "2")
    git("checkout", "main")
    # Local files with the same names, which must not be used.
    write("train.py", SAYS.format("here"))
    write("code/train.py", SAYS.format("here"))
    return f"file://{place}/repo"


def test_the_code_is_the_repositorys(repo):
    wanted = {"main": {}, "branch": {"branch": "team/exp"}}
    for said, more in wanted.items():
        folder = run("train.py", source_dir="code", git_config={"repo": repo, **more}, fit={"job_name": said})
        assert (folder / "model/said").read_text() == said
    folder = run("code/train.py", git_config={"repo": repo, "branch": "team/exp", "commit": "first"})
    assert (folder / "model/said").read_text() == "main"
    assert json.loads((folder / "input/config/hyperparameters.json").read_text())["sagemaker_program"] == '"train.py"'


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        ({}, {}, "entry_point='train.py' is not in the repository"),
        ({}, {"source_dir": "other"}, "source_dir='other' is not in the repository"),
        ({}, {"source_dir": "code", "dependencies": ["../code"]}, "dependencies='../code' is not in the repository"),
        ({"branch": "none"}, {"source_dir": "code"}, "cannot check out the branch none"),
        ({"commit": "0" * 40}, {"source_dir": "code"}, "cannot check out the commit 000"),
    ],
)
def test_paths_missing_in_the_repository_are_reported(repo, config, given, says):
    with pytest.raises(ValueError, match=f"git_config: {says}"):
        run("train.py", git_config={"repo": repo, **config}, **given)
    assert not Path("smddp-jobs").exists()


@pytest.mark.parametrize(
    ("config", "pair", "warns"),
    [
        ({"token": "T"}, "T:", None),
        ({"token": "T", "username": "u", "password": "p"}, "T:", "username, password not used"),
        ({"username": "u", "password": "p"}, "u:p", None),
        ({"username": "u"}, None, "username not used"),
        ({"username": "u", "password": "p", "2FA_enabled": True}, None, "username, password not used"),
        ({"token": "T", "2FA_enabled": True}, "T:", None),
    ],
)
def test_credentials_are_for_the_repositorys_host_and_on_no_command_line(monkeypatch, config, pair, warns):
    ran = []
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda words, env, **_: ran.append((words, env)) or done)
    checked = repository.check({"repo": "https://example.test/a/b.git", **config})
    if warns:
        with pytest.warns(UserWarning, match=warns):
            repository.clone(checked, Path("to"))
    else:
        repository.clone(checked, Path("to"))
    ((words, env),) = ran
    assert words == ["git", "clone", "--quiet", "--", "https://example.test/a/b.git", "to"]
    header = env.get("GIT_CONFIG_VALUE_0", "").removeprefix("Authorization: Basic ")
    assert base64.b64decode(header).decode() == (pair or "")
    assert pair is None or env["GIT_CONFIG_KEY_0"] == "http.https://example.test/.extraHeader"


# ---- entry points ----

WORDS = {"epochs": 3, "text": "a 'b' $HOME `id`", "empty": ""}
EXPECTED = "--empty||--epochs|3|--text|a 'b' $HOME `id`|"


@pytest.mark.parametrize(
    ("entry_point", "given"),
    [
        ("train.sh", {}),
        ("train.sh", {"source_dir": "src"}),
        ("bin/run", {"source_dir": "src"}),
        ("train.sh", {"kind": TensorFlow, "model_dir": False}),
        ("train.sh", {"instance_type": "ml.p3.16xlarge", "distribution": {"smdistributed": {"dataparallel": ON}}}),
        ("train.sh", {"distribution": {"mpi": {"enabled": True, "processes_per_host": 1}}}),
    ],
)
def test_a_shell_script_runs_in_the_code_folder(entry_point, given):
    write(f"{given.get('source_dir', '.')}/{entry_point}", SHELL)
    folder = run(entry_point, hyperparameters=WORDS, fit={"processes_per_host": 1}, **given)
    assert (folder / "model/arguments").read_text() == EXPECTED
    assert (folder / "model/folder").read_text().strip() == str(folder / "code")


def test_a_shell_script_under_torchrun_is_refused():
    with pytest.raises(ValueError, match=r"torchrun runs Python files; entry_point is 'train\.sh'"):
        run("train.sh", distribution={"torch_distributed": ON})


def local(made, capsys):
    (command,) = made.commands(["localhost:2"], job_name="j")
    return command.argv[3:]


def kubernetes(made, capsys):
    made.fit(engine="kubernetes", dry_run=True, job_name="j", processes_per_host=2)
    return json.loads(capsys.readouterr().out)["spec"]["trainer"]["command"][7:]


def torchx(made, capsys):
    words = by_torchx("local_cwd")(made, capsys)[0]
    return ["-m", *words]


def test_no_argument_of_a_script_is_taken_for_an_option_of_torchrun(capsys):
    """Each abbreviation of each option of this torch's torchrun, by every launcher that uses torchrun."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    names = sorted({option[2:end] for option in options for end in range(4, len(option) + 1)})
    assert len(names) > 200 and {"log", "node", "master"} <= set(names)
    write("train.py", "")
    words = [word for name in names for word in (f"--{name}", "v")]
    made = PyTorch(
        "train.py",
        image_uri="registry/train",
        instance_type="ml.m5.xlarge",
        instance_count=1,
        distribution={"torch_distributed": ON},
    )
    for launcher in (local, kubernetes, torchx):
        for at in range(0, len(words), 80):
            made.script_arguments = [*words[at : at + 80], "--", "-m"]
            parsed = parser.parse_args(launcher(made, capsys))
            assert parsed.training_script_args[-len(made.script_arguments) :] == made.script_arguments, launcher


def test_from_a_shell_such_a_name_follows_the_end_of_torchruns_options(capsys):
    write("train.py", "")
    assert shell.main(["train.py", "-n", "1", "--dry-run", "--", "--log", "x"]) == 0
    assert re.search("--no-python -- .*--log x", capsys.readouterr().out)
