"""External text never becomes another path, option, script line or variable, at any entry point."""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from smddp.estimator import PyTorch, engines, job, running, shell
from smddp.estimator.engines import slurm_task
from smddp.estimator.engines.work import work as make_work
from smddp.estimator.preparation import prepare
from smddp.launch import programs

TORCHRUN = {"torch_distributed": {"enabled": True}}
MPI = {"mpi": {"enabled": True, "processes_per_host": 2}}

#: Invalid as a name of any kind.
HOSTILE = (
    "../../escaped",
    "..",
    ".",
    "/absolute",
    "a/../b",
    "-rf",
    "-oProxyCommand=touch escaped;x",
    "--help=x",
    "a\nb",
    "a\0b",
    "a b",
    "$(touch escaped)",
    "`touch escaped`",
    "a;touch escaped",
    "\x1b[2J",
    "a\u202eb",
    "x" * 600,
    "",
)
#: The texts that cannot be values in a batch script either.
CONTROL = tuple(text for text in HOSTILE if not text.isprintable())


def estimator(place: Path, distribution: Any = TORCHRUN, **more: Any) -> PyTorch:
    given = {
        "instance_type": "ml.m5.xlarge",
        "image_uri": "train",
        "instance_count": 1,
        "output_path": str(place / "jobs"),
    }
    return PyTorch("train.py", distribution=distribution, **{**given, **more})


def fit(**fixed: Any) -> Callable[[Path, Any], object]:
    """Calls `fit` with the text in place of TEXT."""

    def call(place: Path, text: str) -> object:
        def put(value: Any) -> Any:
            if isinstance(value, dict):
                return {put(name): put(each) for name, each in value.items()}
            if isinstance(value, list):
                return [put(each) for each in value]
            return value.replace("TEXT", text) if isinstance(value, str) else value

        return estimator(place).fit(**{"job_name": "j", "dry_run": True, **put(fixed)})

    return call


def constructor(name: str) -> Callable[[Path, str], object]:
    return lambda place, text: estimator(place, **{name: text}).fit(dry_run=True)


def refused_by_shell(*words: str) -> Callable[[Path, str], object]:
    def call(place: Path, text: str) -> object:
        status = shell.main(["train.py", "--dry-run", *(word.replace("TEXT", text) for word in words)])
        if status == 2:
            raise ValueError("exit status 2")
        return status

    return call


def smddprun(_: Path, text: str) -> object:
    return programs._parse("smddprun", ["-x", f"{text}=value", "true"], (), ())


NAMES: dict[str, tuple[Callable[[Path, str], object], tuple[str, ...]]] = {
    "job_name": (fit(job_name="TEXT"), HOSTILE),
    "job_name of commands": (lambda place, text: estimator(place).commands(job_name=text), HOSTILE),
    "job_name of slurm": (fit(engine="slurm", job_name="TEXT"), HOSTILE),
    "job_name of kubernetes": (fit(engine="kubernetes", job_name="TEXT"), HOSTILE),
    "base_job_name": (constructor("base_job_name"), HOSTILE[:-1]),
    "host": (fit(hosts=["TEXT"]), HOSTILE),
    "host with ranks": (fit(hosts=["TEXT:2"]), HOSTILE),
    "host's user": (fit(hosts=["TEXT@a:2"]), HOSTILE),
    "host of mpirun": (lambda place, text: estimator(place, MPI).commands([text]), HOSTILE),
    "channel": (fit(inputs={"TEXT": "."}), HOSTILE),
    "channel's place": (fit(inputs={"train": "TEXT"}), CONTROL),
    "interface": (fit(interface="TEXT"), HOSTILE[5:]),
    "interface of an engine": (fit(interface="TEXT", engine="slurm"), HOSTILE[5:]),
    "instance_type": (constructor("instance_type"), HOSTILE),
    "image_uri": (constructor("image_uri"), [*HOSTILE[:2], *HOSTILE[5:]]),
    "output_path": (constructor("output_path"), CONTROL),
    "entry_point in source_dir": (
        lambda place, text: PyTorch(f"{text}/train.py", source_dir=".", image_uri="train", instance_type="local"),
        ("../../escaped", "..", "/absolute", "a/../b", *CONTROL),
    ),
    "environment's names": (lambda place, text: estimator(place, environment={text: "x"}), ("", "a=b", "-a", *CONTROL)),
    "environment's values": (lambda place, text: estimator(place, environment={"A": text}), ("a\0b",)),
    "hyperparameters' names": (lambda place, text: estimator(place, hyperparameters={text: 1}), ("", "a=b", *CONTROL)),
    "hyperparameters' values": (
        lambda place, text: estimator(place, hyperparameters={"a": text}).commands(),
        ("a\0b",),
    ),
    "slurm's options": (fit(engine="slurm", engine_options={"partition": "TEXT"}), CONTROL),
    "slurm's nested options": (
        fit(engine="slurm", engine_options={"additional_parameters": {"a": ["TEXT"]}}),
        CONTROL,
    ),
    "namespace": (fit(engine="kubernetes", engine_options={"namespace": "TEXT"}), HOSTILE),
    "runtime": (fit(engine="kubernetes", engine_options={"runtime": "TEXT"}), HOSTILE),
    "rsh": (fit(rsh="TEXT", hosts=["a:1"]), ("", "a 'b", "a\0b")),
    "--job-name": (refused_by_shell("--job-name=TEXT"), HOSTILE),
    "--hosts": (refused_by_shell("--hosts=TEXT"), HOSTILE[:-1]),
    "--hosts, the second": (refused_by_shell("--hosts=a,TEXT"), HOSTILE),
    "--input": (refused_by_shell("--input=TEXT=."), HOSTILE),
    "--interface": (refused_by_shell("--interface=TEXT"), HOSTILE[5:]),
    "--instance-type": (refused_by_shell("--instance-type=TEXT"), HOSTILE),
    "--option": (refused_by_shell("--engine=slurm", "-o", "partition=TEXT"), CONTROL),
    "smddprun -x": (smddprun, ("", *CONTROL)),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    (inside / "train.py").write_text("")
    return inside


@pytest.mark.parametrize("entry", NAMES)
def test_hostile_names_are_refused_before_anything_is_written(entry: str, place: Path, tmp_path: Path):
    call, texts = NAMES[entry]
    before = sorted(tmp_path.rglob("*"))
    taken = []
    for text in texts:
        try:
            call(place, text)
        except ValueError as error:
            # The message is printed on a terminal.
            assert str(error).replace("\n", "").isprintable(), repr(str(error))
        else:
            taken.append(text)
    assert taken == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("port", [0, -1, 65536, True, "7777"])
def test_a_port_is_a_number_of_a_port(place: Path, port: Any):
    for engine in ({}, {"engine": "slurm"}):
        with pytest.raises(ValueError, match="port: invalid value"):
            estimator(place).fit(dry_run=True, port=port, **engine)


def test_options_of_ssh_end_before_the_host():
    assert running.remote_shell("ssh -p 22") == ["ssh", "-p", "22", "--"]
    assert running.remote_shell("/usr/bin/ssh") == ["/usr/bin/ssh", "--"]
    assert running.remote_shell("kubectl exec") == ["kubectl", "exec"]


def test_dependencies_are_copied_under_names_of_their_own(place: Path):
    """The folder ".." has no name to be copied under."""
    with pytest.raises(ValueError, match="is the root folder"):
        prepare(estimator(place, dependencies=["/"]), _folder(place / "one"), {}, _CONFIG, lambda _: None)
    prepare(
        estimator(place, dependencies=["../../a/b/.."]), _folder(place.parents[1] / "two"), {}, _CONFIG, lambda _: None
    )
    assert (place.parents[1] / "two" / "code" / "a" / "b" / "train.py").exists()


_CONFIG = {"SM_INPUT_DATA_CONFIG": "{}", "SM_RESOURCE_CONFIG": "{}"}


def _folder(path: Path) -> Any:
    return job.Folder(path)


def test_a_line_that_only_looks_like_a_failure_is_a_line():
    right = {"rank": 1, "host": "h", "pid": 2, "status": -40, "ended": 1.5, "last": ""}
    assert running.Failure.parse(json.dumps(right)).how == "was ended by signal 40"
    wrong = [{**right, name: value} for name in right for value in (None, [], "x" if name != "host" else 1, True)]
    wrong = [each for each in wrong if each != {**right, "last": "x"}]
    for found in (*map(json.dumps, wrong), "", "{", "[]", "7", '{"rank": 1}', "[" * 100_000):
        assert running.Failure.parse(found) is None, found


# ---- free text arrives as it was given ----

FREE = (
    "$(HOME)",
    "pa$$word",
    "$$(AWS_SECRET_ACCESS_KEY)",
    "a$b",
    "$$$",
    "$",
    "${local_rank}",
    "${app_id}",
    "$PORT",
    "$FIRST_HOST",
    "$SLURM_NODEID",
    "--no-python",
    "two\nlines",
    "'\"\\",
    "-rf",
    "é",
)


def template(text: str) -> str:
    """torchrun's and torchx's replacement of variables."""
    return string.Template(text).safe_substitute(local_rank="LOCAL", app_id="APP", replica_id="0", img_root="/")


def kubernetes(text: str) -> str:
    """Kubernetes' replacement in a container's command and env: $$ is $, $(NAME) a variable that exists."""
    known = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "secret"}
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else known.get(found[1], found[0]),
        text,
        flags=re.DOTALL,
    )


def of_torchrun(words: list[str]) -> list[str]:
    """The command that torchrun starts."""
    return [template(word) for word in words[words.index("--no-python") + 2 :]]


def local(made: PyTorch, capsys: Any) -> tuple[list[str], dict[str, str]]:
    (command,) = made.commands(["localhost:2"], job_name="j")
    return of_torchrun(command.argv), command.env


def by_slurm(made: PyTorch, capsys: Any) -> tuple[list[str], dict[str, str]]:
    engine = engines.find("slurm", {})
    work = make_work(made, engine, _folder(Path("/jobs/j")), {}, "j", 2, None, 7777, sys.executable)
    own = {slurm_task.NODE: "0", slurm_task.FIRST_HOST: "host", slurm_task.PORT: "20000"}
    return of_torchrun(slurm_task.placed(engine.command(work), own)), work.env


def by_kubernetes(made: PyTorch, capsys: Any) -> tuple[list[str], dict[str, str]]:
    made.fit(engine="kubernetes", dry_run=True, job_name="j", processes_per_host=2)
    trainer = json.loads(capsys.readouterr().out)["spec"]["trainer"]
    env = {each["name"]: kubernetes(each["value"]) for each in trainer["env"]}
    return of_torchrun([kubernetes(word) for word in trainer["command"]]), env


def by_torchx(scheduler: str) -> Callable[[PyTorch, Any], tuple[list[str], dict[str, str]]]:
    def call(made: PyTorch, capsys: Any) -> tuple[list[str], dict[str, str]]:
        taken: dict[str, Any] = {}

        class Runner:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def scheduler_backends(self) -> list[str]:
                return [scheduler]

            def dryrun(self, app: Any, *_: object) -> str:
                return "request"

        def ddp(*args: str, m: str, env: dict[str, str], **_: object) -> object:
            taken.update(args=[m, *args], env=env)
            return SimpleNamespace(roles=[])

        modules = {
            "torchx.runner": SimpleNamespace(get_runner=Runner),
            "torchx.components.dist": SimpleNamespace(ddp=ddp),
        }
        with pytest.MonkeyPatch.context() as patched:
            for name, module in modules.items():
                patched.setitem(sys.modules, name, module)
            options = {"scheduler": scheduler}
            made.fit(engine="torchx", engine_options=options, dry_run=True, job_name="j", processes_per_host=2)
        capsys.readouterr()
        then = kubernetes if scheduler == "kubernetes" else str
        env = {name: then(template(value)) for name, value in taken["env"].items()}
        return [template(then(template(word))) for word in taken["args"]], env

    return call


WAYS = {
    "torchrun": local,
    "slurm": by_slurm,
    "kubernetes": by_kubernetes,
    "torchx": by_torchx("local_cwd"),
    "torchx on kubernetes": by_torchx("kubernetes"),
}


@pytest.mark.parametrize("way", WAYS)
def test_free_text_reaches_the_script_unchanged(way: str, place: Path, capsys: pytest.CaptureFixture[str]):
    names = [f"n{number}" for number in range(len(FREE))]
    texts = dict(zip(names, FREE))
    made = estimator(place, hyperparameters=texts, environment={name.upper(): text for name, text in texts.items()})
    made.script_arguments = list(FREE)
    words, env = WAYS[way](made, capsys)
    assert words[-len(FREE) :] == list(FREE)
    given = {words[at]: words[at + 1] for at in (words.index(f"--{name}") for name in names)}
    assert given == {f"--{name}": text for name, text in texts.items()}
    assert {name: env[name.upper()] for name in names} == texts
    assert {name: env[f"SM_HP_{name.upper()}"] for name in names} == texts
