"""Installs what its arguments name, as `pip install` does, but torch without CUDA. It needs gcc and binutils.

torch's wheels for Linux on the package index require CUDA's libraries, which are gigabytes. They can't be imported
without them, although nothing of them is called on a host without a GPU. This program installs torch without what it
requires. It then compiles, for each library of CUDA, one that has the symbols that torch's libraries need. Each
function returns 100, CUDA's error for "no device". The libraries are put beside torch's own, where the loader looks for
them. Last, it removes CUDA's packages from the metadata of torch, so that pip installs the others only.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

TORCH = re.compile(r"torch *([<>=!~;]|$)")
REQUIRES_CUDA = re.compile(r"^Requires-Dist: (cuda|nvidia|triton).*\n", re.MULTILINE)
VENDORS = re.compile(r"lib(cu|nv|nccl)")
PLAIN = "libnccl.so.2"  # torch needs it in each wheel for CUDA; it gets the symbols that have no version


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(library: Path) -> Iterator[tuple[bool, str, str]]:
    """Yield, for each symbol that is not weak, whether `library` defines it, its name and the name of its version."""
    for line in output("objdump", "-T", library).splitlines():
        found = re.match(r"[0-9a-f]{16} (.{7}) (\S+)\s+[0-9a-f]+\s+(.+)", line)
        if found and "w" not in found[1]:
            *version, name = found[3].split()
            yield found[2] != "*UND*", name, version[0].strip("()") if version else "Base"


def compile_library(directory: Path, soname: str, versions: dict[str, set[str]]) -> None:
    names = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as temporary:
        source, script = Path(temporary, "stub.c"), Path(temporary, "versions")
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
        script.write_text(
            "".join(
                f"{version} {{ global: {'; '.join(sorted(of))}; }};\n" for version, of in versions.items() if version
            )
        )
        options = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        output("gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{soname}", *options, "-o",
               directory / soname, source)  # fmt: skip


def replace_libraries(directory: Path) -> None:
    libraries = sorted(directory.glob("*.so*"))
    stubs: dict[str, dict[str, set[str]]] = {}
    files: dict[str, str] = {}  # by the name of a version, the library that has it
    for library in libraries:
        for soname in re.findall(r"NEEDED.*\[(.+)\]", output("readelf", "-dW", library)):
            if VENDORS.match(soname) and not (directory / soname).exists():
                stubs[soname] = {}
        soname = ""
        for line in output("readelf", "-VW", library).splitlines():
            soname = found[1] if (found := re.search(r"File: (\S+)", line)) else soname
            if found := re.search(r"Name: (\S+)", line):
                files.setdefault(found[1], soname)
    every = {symbol for library in libraries for symbol in symbols(library)}
    defined = {name for is_defined, name, _ in every if is_defined}
    others = [ctypes.CDLL(name) for name in (None, "libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")]
    for is_defined, name, version in every:
        if is_defined:
            continue
        if version == "Base":
            is_elsewhere = (
                name in defined or name.startswith(("Py", "_")) or any(hasattr(each, name) for each in others)
            )
            if not is_elsewhere and PLAIN in stubs:
                stubs[PLAIN].setdefault("", set()).add(name)
        elif files.get(version) in stubs:
            stubs[files[version]].setdefault(version, set()).add(name)
    for soname, versions in stubs.items():
        compile_library(directory, soname, versions)
    print(f"{directory}: {', '.join(sorted(stubs)) or 'nothing to replace'}")


def main(arguments: list[str]) -> int:
    install = [sys.executable, "-I", "-m", "pip", "install"]
    for requirement in arguments:
        if TORCH.match(requirement):
            subprocess.run([*install, "--no-deps", requirement], check=True)
            torch = distribution("torch")
            replace_libraries(Path(str(torch.locate_file("torch/lib"))))
            metadata = next(Path(str(each.locate())) for each in torch.files or () if each.name == "METADATA")
            metadata.write_text(REQUIRES_CUDA.sub("", metadata.read_text(encoding="utf-8")), encoding="utf-8")
    return subprocess.run([*install, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
