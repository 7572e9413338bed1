"""The code of a job from a Git repository: git_config of the SDK."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smddp import validation
from smddp.text import did_you_mean

_KEYS = ("repo", "branch", "commit", "2FA_enabled", "username", "password", "token")
_URL = re.compile(r"(https://|ssh://|git@[\w.-]+:|file://|/)\S*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+@-]*")
# Git ends a transfer of less than 1,000 bytes per second after a minute, and ssh a connection without answers.
_SILENT_SERVERS = {
    "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
    "GIT_HTTP_LOW_SPEED_TIME": "60",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=30 -oServerAliveInterval=20",
}
_CREDENTIALS = ("username", "password", "token")


def check(config: Any) -> dict[str, Any]:
    """Returns a validated git_config. Raises ValueError for unknown keys, values of other types, or an invalid repo."""
    if not isinstance(config, Mapping):
        raise ValueError(f'git_config is {config!r}: expected {{"repo": URL, "branch": NAME, "commit": HASH}}')
    for key, value in config.items():
        if key not in _KEYS:
            raise ValueError(f"git_config: unknown key {key!r}{did_you_mean(key, _KEYS)} (keys: {', '.join(_KEYS)})")
        kind = bool if key == "2FA_enabled" else str
        if not isinstance(value, kind):
            raise ValueError(f"git_config: {key!r} must be {kind.__name__}, got {type(value).__name__}")
    if "repo" not in config:
        raise ValueError("git_config: 'repo' is missing: give the URL of the repository")
    repo = validation.line(config["repo"], "git_config: repo")
    if not _URL.fullmatch(repo) or (repo.startswith("https://") and "@" in urlsplit(repo).netloc):
        raise ValueError(
            f"git_config: invalid repo {_without_password(repo)!r}: expected https://, ssh://, git@HOST:, file:// or a "
            "path, and credentials as username, password or token"
        )
    for key in ("branch", "commit"):
        if key in config and (not _REVISION.fullmatch(config[key]) or ".." in config[key]):
            raise ValueError(f"git_config: invalid {key} {validation.line(config[key], key)!r}")
    return dict(config)


def clone(config: Mapping[str, Any], to: Path) -> None:
    """Clones the repository into the folder `to` and checks out its branch and commit.

    Without a branch and a commit it is the default branch. Git asks no questions. Raises ValueError where Git fails.
    """
    repo = config["repo"]
    env = {**_SILENT_SERVERS, **os.environ, "GIT_TERMINAL_PROMPT": "0", **_authorization(config)}
    _git(["clone", "--quiet", "--", repo, str(to)], env, f"clone {repo}")
    for key in ("branch", "commit"):
        if key in config:
            _git(["-C", str(to), "checkout", "--quiet", config[key]], env, f"check out the {key} {config[key]}")


def source(to: Path, entry_point: str, source_dir: str | None, dependencies: list[str]) -> tuple[str, str | None, list]:
    """Returns entry_point, source_dir and dependencies as paths on this machine; they are relative to the repository.

    Raises ValueError for a path that is missing in the repository or leaves it.
    """
    base = to if source_dir is None else to / source_dir
    wanted = [
        ("source_dir", base, source_dir),
        ("entry_point", base / entry_point, entry_point),
        *(("dependencies", to / each, each) for each in dependencies),
    ]
    for argument, path, given in wanted:
        inside = path.resolve() == to.resolve() or to.resolve() in path.resolve().parents
        if not path.exists() or not inside:
            raise ValueError(f"git_config: {argument}={given!r} is not in the repository")
    script = entry_point if source_dir is not None else str(base / entry_point)
    return script, None if source_dir is None else str(base), [str(to / each) for each in dependencies]


def _authorization(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns variables that give Git the credentials, for the repository's own host alone.

    The rules are the SDK's: a token, else username and password; a token alone with 2FA; no token in CodeCommit.
    """
    repo, given = config["repo"], [name for name in _CREDENTIALS if name in config]
    codecommit = "://git-codecommit" in repo
    if not repo.startswith("https://"):
        if given:
            warnings.warn(f"git_config: {', '.join(given)} not used: {repo} is not https://", stacklevel=4)
        return {}
    usable = []
    if "token" in config and not codecommit:
        usable = ["token"]
    elif {"username", "password"} <= config.keys() and (codecommit or not config.get("2FA_enabled", False)):
        usable = ["username", "password"]
    if ignored := [name for name in given if name not in usable]:
        warnings.warn(f"git_config: {', '.join(ignored)} not used for {repo}", stacklevel=4)
    if not usable:
        return {}
    pair = ":".join([config["token"], ""] if usable == ["token"] else [config["username"], config["password"]])
    parts = urlsplit(repo)
    # Variables, since command lines are visible to all users of the machine.
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"http.{parts.scheme}://{parts.netloc}/.extraHeader",
        "GIT_CONFIG_VALUE_0": f"Authorization: Basic {base64.b64encode(pair.encode()).decode()}",
    }


def _git(words: list[str], env: Mapping[str, str], action: str) -> None:
    try:
        done = subprocess.run(["git", *words], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise ValueError(f"git_config: cannot {action}: git is not installed on this machine") from None
    if done.returncode != 0:
        raise ValueError(f"git_config: cannot {action}: {done.stderr.strip()[-500:]}")


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", url)
