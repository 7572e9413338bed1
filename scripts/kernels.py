"""Makes crates/smddp-cuda/kernels/reduce.ptx of reduce.cu.

  scripts/kernels.py            compile and write it
  scripts/kernels.py --check    compile, hold it to the file, assemble that for several GPUs; prints registers and
                                spills, exit 1 when the file differs, does not assemble, or spills where it must not

No CUDA installation and no GPU is needed: the compiler (NVRTC) and the assembler (ptxas) come out of NVIDIA's wheels
on PyPI, into a temporary directory (about 60 MB, 250 MB with --check). The compiler is that of CUDA 12.0, since what it
writes is understood by every driver from 525 on, and a newer one's output by newer drivers alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "crates" / "smddp-cuda" / "kernels"
SOURCE = KERNELS / "reduce.cu"
PTX = KERNELS / "reduce.ptx"

COMPILER = "nvidia-cuda-nvrtc-cu12==12.0.140"
# The oldest GPU that is served; the driver translates for the one that is there.
ARCHITECTURE = "compute_70"
# What is added and multiplied is rounded each time, as on a processor, and subnormal numbers are numbers.
OPTIONS = [f"--gpu-architecture={ARCHITECTURE}", "--fmad=false", "--ftz=false", "--prec-div=true"]

# The oldest assembler and a new one, each with GPUs it knows, and whether a spill there is an error.
ASSEMBLERS = {
    "nvidia-cuda-nvcc-cu12==12.0.140": {"sm_70": True, "sm_80": True, "sm_90": True},
    "nvidia-cuda-nvcc==13.0.88": {"sm_80": True, "sm_90": True, "sm_100": True, "sm_120": False},
}


def wheel(requirement: str, into: Path) -> Path:
    """The files of one wheel, in a directory of its own."""
    directory = into / re.sub(r"\W+", "-", requirement)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), requirement]
    subprocess.run(pip, check=True)
    return directory


def only(directory: Path, pattern: str) -> Path:
    found = sorted(directory.rglob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{pattern}: {len(found)} files in {directory}")
    return found[0]


class Nvrtc:
    def __init__(self, directory: Path) -> None:
        library = only(directory, "libnvrtc.so.12")
        # It opens its own part by name alone.
        ctypes.CDLL(str(only(directory, "libnvrtc-builtins.so.*")), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def compile(self, source: bytes) -> str:
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, b"reduce.cu", 0, None, None)
        options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
        try:
            self.call("nvrtcCompileProgram", program, len(OPTIONS), options)
        except RuntimeError as error:
            raise SystemExit(f"{error}\n{self.text('ProgramLog', program)}")
        return self.text("PTX", program)


def tidy(ptx: str) -> str:
    """Without comments, empty lines, and the table of targets that every program gets and ours does not use.

    It is a part of every wheel: no space that means nothing, and short names of labels, which are each kernel's own.
    """
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in ptx.splitlines())
    text = "".join(f"{line}\n" for line in lines if line and "2nv6target" not in line)
    return re.sub(r"\$L__BB\d+_", "$L", re.sub(r", ", ",", re.sub(r"[ \t]+", " ", text)))


def made(temporary: Path) -> str:
    source = SOURCE.read_bytes()
    ptx = Nvrtc(wheel(COMPILER, temporary)).compile(source)
    release = re.search(r"release [\d.]+, V[\d.]+", ptx)
    head = (
        "// Made of reduce.cu by scripts/kernels.py.\n"
        f"// source: sha256 {hashlib.sha256(source).hexdigest()}\n"
        f"// compiler: NVRTC {release.group() if release else 'unknown'}, {' '.join(OPTIONS)}\n"
    )
    return head + tidy(ptx)


def assemble(requirement: str, gpus: dict[str, bool], temporary: Path) -> bool:
    ptxas = only(wheel(requirement, temporary), "ptxas")
    ptxas.chmod(0o755)
    good = True
    for gpu, strict in gpus.items():
        command = [ptxas, "-v", f"-arch={gpu}", PTX, "-o", temporary / "cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{requirement} {gpu}:\n{done.stdout}{done.stderr}")
            good = False
            continue
        # For each kernel: its name, then bytes spilled, then registers.
        output = done.stdout + done.stderr
        names = re.findall(r"Compiling entry function '(\w+)'", output)
        stores = [int(spill) for spill in re.findall(r"(\d+) bytes spill stores", output)]
        registers = [int(used) for used in re.findall(r"Used (\d+) registers", output)]
        spilled = {name: spill for name, spill in zip(names, stores) if spill}
        hot = ", ".join(f"{n} {r}" for n, r in zip(names, registers) if n.startswith("smddp_sum_") and "f" in n)
        size = (temporary / "cubin").stat().st_size
        print(f"{requirement} {gpu}: {len(names)} kernels, {size} bytes; bytes spilled: {spilled or 'none'}")
        print(f"    registers {min(registers)} to {max(registers)}: {hot}")
        good = good and not (strict and spilled)
    return good


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="smddp-kernels-") as name:
        temporary = Path(name)
        ptx = made(temporary)
        if "--check" not in arguments:
            PTX.write_text(ptx)
            return 0
        good = PTX.exists() and PTX.read_text() == ptx
        if not good:
            print(f"{PTX} is not what {SOURCE} compiles to: run scripts/kernels.py", file=sys.stderr)
            return 1
        results = [assemble(requirement, gpus, temporary) for requirement, gpus in ASSEMBLERS.items()]
        return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
