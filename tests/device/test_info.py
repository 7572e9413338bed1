"""What `smddp info` tells of CUDA."""

from types import SimpleNamespace

import pytest
from smddp import _info, cli


def cuda_of(monkeypatch: pytest.MonkeyPatch, **found) -> list[str]:
    monkeypatch.setattr(_info, "core", lambda: SimpleNamespace(cuda=lambda start: found))
    return cli._cuda(_info.cuda())


def test_a_missing_driver_is_told_with_its_reason(monkeypatch):
    lines = cuda_of(monkeypatch, found=False, why="libcuda.so.1 was not found", driver="", devices=[])
    assert lines == ["CUDA tensors are not served: libcuda.so.1 was not found"]


def test_driver_devices_and_paths_are_told(monkeypatch):
    lines = cuda_of(monkeypatch, found=True, why="", driver="580.95, CUDA 13.0", devices=["0: NVIDIA H200"])
    text = "\n".join(lines)
    for words in ("580.95, CUDA 13.0", "0: NVIDIA H200", "copy engines", "pinned host memory"):
        assert words in text
