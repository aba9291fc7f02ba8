"""Our declarations of libfabric's structs and constants against the headers of an installed libfabric."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from neuron_pushkv.fabric import discovery

OURS = Path(discovery.__file__).parent / "ofi.h"
THEIRS = ("fabric", "fi_domain", "fi_endpoint", "fi_cm", "fi_rma", "fi_eq", "fi_errno")
FOLDERS = (Path("/opt/amazon/efa/include"), Path("/usr/include"), Path("/usr/local/include"))

SINCE = {
    "fi_mr_dmabuf": (1, 20),
    "fi_mr_attr.dmabuf": (1, 20),
    "FI_MR_DMABUF": (1, 20),
    "FI_OPT_CUDA_API_PERMITTED": (1, 18),
    "FI_OPT_SHARED_MEMORY_PERMITTED": (1, 21),
}
"""What older headers have not got: structs, members, constants."""

HANDED_IN = ("fi_av_attr", "fi_cq_attr", "fi_mr_attr", "fi_cq_err_entry")
"""What the library reads or writes in memory of ours, which must be large enough for it."""


def declared() -> tuple[dict[str, list[str]], list[str]]:
    """Struct -> its members, and the constants, as in our header."""
    text = re.sub(r"/\*.*?\*/", "", OURS.read_text(), flags=re.DOTALL)
    structs = {}
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, flags=re.DOTALL | re.MULTILINE):
        flat = re.sub(r"union \{(.*?)\};", r"\1", body, flags=re.DOTALL)
        unions = re.findall(r"union \{([^}]*)\} (\w+);", flat)
        for inner, name_of_union in unions:
            flat = flat.replace(f"union {{{inner}}} {name_of_union};", f"union {name_of_union};")
        members = []
        for declaration in flat.split(";"):
            function = re.search(r"\(\*(\w+)\)", declaration)
            last = re.search(r"(\w+)\s*$", declaration)
            if function or last:
                members.append((function or last)[1])  # type: ignore[index]
        structs[name] = members
    constants = re.findall(r"^#define (FI_\w+) ", text, flags=re.MULTILINE)
    for body in re.findall(r"enum \{(.*?)\}", text, flags=re.DOTALL):
        constants += re.findall(r"(FI_\w+) =", body)
    return structs, constants


def known(version: tuple[int, int]) -> tuple[dict[str, list[str]], list[str]]:
    """Of what we declare, what libfabric of that ``version`` has too."""
    structs, constants = declared()
    old = {name for name, since in SINCE.items() if version < since}
    members = {
        struct: [member for member in members if f"{struct}.{member}" not in old]
        for struct, members in structs.items()
        if struct not in old
    }
    return members, [constant for constant in constants if constant not in old]


def program(includes: list[str], version: tuple[int, int]) -> str:
    structs, constants = known(version)
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <sys/uio.h>", *includes, "int main(void) {"]
    for struct, members in structs.items():
        for member in members:
            lines.append(
                f'printf("{struct}.{member} %zu %zu\\n", offsetof(struct {struct}, {member}), '
                f"sizeof ((struct {struct} *)0)->{member});"
            )
    for constant in constants:
        lines.append(f'printf("{constant} %llu\\n", (unsigned long long)({constant}));')
    for struct in HANDED_IN:
        lines.append(f'fprintf(stderr, "{struct} %zu\\n", sizeof(struct {struct}));')
    return "\n".join([*lines, "return 0; }"])


def compiled(
    folder: Path, includes: list[str], flags: list[str], version: tuple[int, int]
) -> subprocess.CompletedProcess[str]:
    output = folder / "layout"
    compiler = os.environ.get("CC", "cc")
    source = program(includes, version)
    subprocess.run([compiler, "-std=gnu11", "-x", "c", *flags, "-o", output, "-"], input=source, text=True, check=True)
    return subprocess.run([output], capture_output=True, text=True, check=True)


def test_our_declarations_are_a_prefix_of_libfabrics(tmp_path: Path) -> None:
    folder = next((folder for folder in FOLDERS if (folder / "rdma/fabric.h").is_file()), None)
    if folder is None:
        pytest.skip("needs libfabric's headers: apt-get install libfabric-dev")
    header = (folder / "rdma/fabric.h").read_text()
    numbers = [re.search(rf"#define FI_{part}_VERSION (\d+)", header) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number[1]) for number in numbers if number)
    version = (major, minor)
    structs, constants = known(version)
    assert len(structs) >= 25
    assert len(constants) >= 35
    assert structs["fi_mr_attr"][-2:] == ["iface", "device"]
    ours = compiled(tmp_path, [f'#include "{OURS}"'], [], version)
    includes = [f"#include <rdma/{name}.h>" for name in THEIRS]
    theirs = compiled(tmp_path, includes, [f"-I{folder}", "-Wno-deprecated-declarations"], version)
    assert ours.stdout.splitlines() == theirs.stdout.splitlines()
    room = int(re.search(r"#define PK_ROOM (\d+)", OURS.read_text())[1])  # type: ignore[index]
    for line in theirs.stderr.splitlines():
        assert int(line.split()[1]) <= room, line
