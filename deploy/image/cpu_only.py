"""Makes an environment the CPU's: ``python cpu_only.py ENVIRONMENT``, in the image's build, with gcc and binutils.

PyPI's torch for x86 is linked against CUDA's libraries, 2.7 GB of them, which are there for a card only. The lock of
the image leaves them out but for CUDA's runtime, which says that there is no card, and here torch gets a stand-in under
their names, so that it loads: one small library with the functions that nothing else defines. Nobody calls them without
a card; each would answer 100, a failure in every one of those libraries. A torch that was built for the CPU lacks
nothing, and gets nothing.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

STAND_IN = "libno_cuda.so"
INTEL_OPENMP = ("libiomp5.so",)
"""All that is needed of the packages of Intel's runtime, which fill the environment's lib with offloading to cards."""
ONLY_FOR_A_CARD = (
    "torch/lib/libtorch_cuda_linalg.so",
    "torch/lib/libcaffe2_nvrtc.so",
    "nvidia/*/lib/libnvperf_*.so",
)
"""What is loaded when a card is first asked for: patterns below site-packages."""
WITH_TESTS = ("mpmath", "networkx", "numba", "numpy", "sympy")
"""Packages that come with their tests, which are some 70 MB."""
UNVERSIONED = "no_cuda"


def lacking(trace: str) -> list[str]:
    """The libraries that the dynamic linker does not find, of what ``ldd`` says, sorted."""
    return sorted(set(re.findall(r"^\s*(\S+) => not found", trace, re.MULTILINE)))


def present(trace: str) -> list[Path]:
    """The libraries that it finds, sorted; its own file too, which defines some functions."""
    return [Path(path) for path in sorted(set(re.findall(r"^\s*(?:\S+ => )?(/\S+) \(0x", trace, re.MULTILINE)))]


def functions(needed: str, defined: str) -> dict[str, str]:
    """The stand-in's functions with their versions, of what ``nm`` says: needed, defined by nobody, and not Python's.

    Weak ones may be missing. A version is mostly the name of the library that was there when torch was linked.
    """
    have = set(re.findall(r"^(\w+)", defined, re.MULTILINE))
    found = re.findall(r"^(\w+)(?:@+(\S+))? U", needed, re.MULTILINE)
    return {name: version or UNVERSIONED for name, version in sorted(found) if name not in have and name[:2] != "Py"}


def source(functions: Iterable[str]) -> str:
    """The stand-in in C."""
    return "".join(f"int {name}(void) {{ return 100; }}\n" for name in functions)


def versions(functions: Mapping[str, str]) -> str:
    """The linker's script that gives each function its version. A name without one finds whichever there is."""
    lines = dict.fromkeys(functions.values(), "")
    for name, version in functions.items():
        lines[version] += f" {name};"
    return "".join(f"{version} {{ global:{names} }};\n" for version, names in lines.items())


def stand_in(folder: Path) -> list[str]:
    """Put the stand-in into torch's ``folder`` of libraries, under every name that is missing there; these names."""
    ours = sorted(folder.glob("*.so*"))
    trace = run("ldd", *ours)
    missing = lacking(trace)
    if not missing:
        return []
    symbols = ("nm", "--dynamic", "--format=posix")
    needed = run(*symbols, "--undefined-only", *ours)
    made = functions(needed, run(*symbols, "--defined-only", *ours, *present(trace)))
    with tempfile.TemporaryDirectory() as scratch:
        code, script = Path(scratch) / "no_cuda.c", Path(scratch) / "versions"
        code.write_text(source(made))
        script.write_text(versions(made))
        # Calls are bound to it by their versions alone, as the dynamic linker insists on.
        run("gcc", "-shared", "-fPIC", "-s", "-w", f"-Wl,--version-script={script}", "-o", folder / STAND_IN, code)
    for name in missing:
        (folder / name).symlink_to(STAND_IN)  # one file of many names is loaded once
    return missing


def remove_unused(environment: Path, packages: Path) -> None:
    """Remove what only a card, a linker or a developer of these packages needs."""
    libraries = environment / "lib"
    for path in libraries.iterdir():
        if path.is_file() and path.name not in INTEL_OPENMP:
            path.unlink()
    for pattern in (*ONLY_FOR_A_CARD, "**/*.a"):
        for path in list(packages.glob(pattern)):
            path.unlink()
    for name in WITH_TESTS:
        for folder in list((packages / name).rglob("tests")):
            shutil.rmtree(folder)


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (site,) = root.glob("lib/python3*/site-packages")
    remove_unused(root, site)
    names = stand_in(site / "torch" / "lib")
    print(f"{STAND_IN} stands in for {', '.join(names) or 'nothing'}")
