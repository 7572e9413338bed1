"""Input channels of a job: a folder each, linked to local files or copied from S3."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smddp import validation

#: Settings of a TrainingInput, with the only value that has the same result in a job that runs here.
_SETTINGS = {
    "S3DataType": ("S3Prefix",),
    "S3DataDistributionType": ("FullyReplicated",),
    "InputMode": ("File", "FastFile"),
    "CompressionType": ("None",),
    "RecordWrapperType": ("None",),
    "ShuffleConfig": (),
    "AttributeNames": (),
    "HubAccessConfig": (),
}


def channels(inputs: Any) -> dict[str, str]:
    """Returns the place of each channel of `fit(inputs)`; one place without a name is the channel "training".

    Raises ValueError for anything but a path, file://..., s3://... or an object with an S3 URI, and for settings of
    such an object that would change the data.
    """
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        inputs = {"training": inputs}
    found = {}
    for name, value in inputs.items():
        place = _place_of(name, value.config) if hasattr(value, "config") else value
        if not isinstance(place, (str, os.PathLike)):
            raise ValueError(f"inputs: channel {name!r} is {value!r}: give a path, file://... or s3://...")
        found[validation.path_name(str(name), "inputs: channel")] = validation.line(
            os.fspath(place), f"inputs: channel {name!r}"
        )
    return found


def _place_of(channel: object, config: Mapping[str, Any]) -> Any:
    source = config.get("DataSource", {}).get("S3DataSource", {})
    for setting, value in {**config, **source}.items():
        if setting in _SETTINGS and value is not None and value not in _SETTINGS[setting]:
            expected = " or ".join(_SETTINGS[setting]) or "no value"
            raise ValueError(
                f"inputs: channel {channel!r} has {setting}={value!r}, which is not applied here: expected {expected}"
            )
    return source.get("S3Uri")


def check_mode(input_mode: object) -> None:
    """Raises ValueError for an input_mode other than files."""
    if input_mode not in ("File", "FastFile"):
        raise ValueError(
            f"input_mode is {input_mode!r}, and channels are folders here: give 'File' or 'FastFile', or leave it out"
        )


def local_path(place: str) -> Path | None:
    """Returns the path of a channel's files on this machine; None for S3. Raises ValueError for a missing path."""
    if place.startswith("s3://"):
        return None
    scheme, separator, rest = place.partition("://")
    if separator and scheme != "file":
        raise ValueError(f"inputs: {place!r} is neither a path nor file:// nor s3://")
    path = Path(rest if separator else place).absolute()
    if not path.exists():
        raise ValueError(f"inputs: there is nothing at {str(path)!r}")
    return path


def folder_of(value: object, argument: str) -> Path:
    """Returns the folder of a path or file://. Raises ValueError with the remedy for s3:// and other schemes."""
    text = validation.line(str(value), argument)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return Path(rest if separator else text).absolute()
    mount = ", such as the folder at which Mountpoint for Amazon S3 has the bucket" if scheme == "s3" else ""
    raise ValueError(f"{argument} is {text!r}: the job writes files into a folder: give a path or file://{mount}")


def place_channel(place: str, path: Path | None, folder: Path) -> None:
    """Makes `folder`, the folder of a channel: a link to a folder, or a folder with a link to a file.

    path: the result of `local_path(place)`. Objects of S3 are copied. Raises ValueError where the copy fails.
    """
    if path is None:
        _copy_from_s3(place, folder)
    elif path.is_dir():
        folder.symlink_to(path)
    else:
        folder.mkdir()
        (folder / path.name).symlink_to(path)


def _copy_from_s3(place: str, folder: Path) -> None:
    if shutil.which("aws") is None:
        raise ValueError(f"inputs: {place!r} needs the `aws` program, which is not here: copy it and give the path")
    folder.mkdir()
    _aws("sync", place, str(folder))
    if not any(folder.iterdir()):
        # "sync" copies what is below a prefix, and nothing for the key of one object.
        _aws("cp", place, f"{folder}/")
    if not any(folder.iterdir()):
        raise ValueError(f"inputs: no object found at {place!r}")


def _aws(*words: str) -> None:
    done = subprocess.run(["aws", "s3", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"inputs: aws s3 {words[0]} {words[1]}: {done.stderr.strip()[-500:]}")
