"""Our declarations of libnrt, the stand-in, and the public headers: one and the same."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from neuron_pushkv.device.neuron import maps
from neuron_pushkv.device.neuron.declarations import CDEF, OPTIONAL, REQUIRED
from neuron_pushkv.device.neuron.library import Library, find
from neuron_pushkv.device.neuron.runtime import FAMILIES
from neuron_pushkv.device.neuron.status import STATUSES, error_for
from neuron_pushkv.errors import DeviceError, NeuronError
from tests.fakes.build import compile_library
from tests.fakes.nrt import compile_nrt

TYPES, FUNCTIONS = CDEF[: CDEF.index("NRT_STATUS nrt_init")], CDEF[CDEF.index("NRT_STATUS nrt_init") :]
HEADERS = ("nrt/nrt.h", "nrt/nrt_experimental.h", "nrt/nrt_version.h")


def enumerators() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b(NRT_\w+) = (\d+)", TYPES)}


def structs() -> dict[str, list[str]]:
    """Name of a struct -> its members."""
    bodies = re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", TYPES, flags=re.DOTALL)
    return {name: re.findall(r"(\w+)(?:\[\d+\])?;", body) for body, name in bodies}


def program(functions: str = FUNCTIONS, values: dict[str, int] | None = None) -> str:
    """Compiles if our functions, structs and constants are those of the headers.

    A function may be declared twice only with the same types. Of structs, ours are declared under other names.
    """
    lines = ["#include <stddef.h>", *(f'#include "{header}"' for header in HEADERS), functions]
    ours = re.sub(
        r"\b(nrt_tensor_batch|nrt_instance_info|nrt_vnc_memory_stats|nrt_version)(_op)?(_t)?\b", r"our_\g<0>", TYPES
    )
    for name, members in structs().items():
        (text,) = re.findall(rf"typedef struct \w+ \{{[^}}]*\}} our_{name};", ours)
        lines.append(text)
        lines.append(f'_Static_assert(sizeof({name}) == sizeof(our_{name}), "size of {name}");')
        for member in members:
            lines.append(
                f"_Static_assert(offsetof({name}, {member}) == offsetof(our_{name}, {member}) && "
                f"sizeof((({name} *)0)->{member}) == sizeof(((our_{name} *)0)->{member}), "
                f'"{name}.{member}");'
            )
    for name, value in (enumerators() if values is None else values).items():
        lines.append(f'_Static_assert({name} == {value}, "{name}");')
    return "\n".join(lines) + "\n"


def compiles(text: str, headers: Path) -> subprocess.CompletedProcess[str]:
    command = [os.environ.get("CC", "cc"), "-std=c11", "-fsyntax-only", f"-I{headers}", "-x", "c", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@pytest.fixture
def headers() -> Path:
    folder = os.environ.get("PUSHKV_NRT_INCLUDE")
    if not folder:
        pytest.skip("needs libnrt's public headers: set PUSHKV_NRT_INCLUDE to the folder with nrt/nrt.h")
    return Path(folder)


def test_our_declarations_are_those_of_the_public_headers(headers: Path) -> None:
    done = compiles(program(), headers)
    assert done.returncode == 0, done.stderr
    for wrong in (
        program(FUNCTIONS.replace("int vnc, size_t size", "int vnc, uint32_t size")),
        program(FUNCTIONS.replace("bool unsafe", "int unsafe")),
        program(values={"NRT_CLOSED": 15}),
    ):
        assert compiles(wrong, headers).returncode != 0


def test_the_stand_in_compiles_against_the_public_headers(headers: Path, tmp_path: Path) -> None:
    compile_nrt(tmp_path, headers=headers)


def test_all_that_is_declared_is_looked_for() -> None:
    functions = set(re.findall(r"\b(nrt_\w+)\(", FUNCTIONS))
    assert functions == set(REQUIRED) | OPTIONAL
    assert not set(REQUIRED) & OPTIONAL


def test_the_comparison_sees_every_struct_and_constant() -> None:
    assert {name: len(members) for name, members in structs().items()} == {
        "nrt_tensor_batch_op_t": 3,
        "nrt_tensor_batch_t": 3,
        "nrt_instance_info_t": 4,
        "nrt_vnc_memory_stats_t": 2,
        "nrt_version_t": 6,
    }
    assert len(enumerators()) == 28 + 3 + 2 + 16


def test_every_status_has_its_name_an_exception_and_an_advice() -> None:
    placements = ("NRT_TENSOR", "NRT_FRAMEWORK", "NRT_INSTANCE", "NRT_SUCCESS")
    codes = {value: name for name, value in enumerators().items() if not name.startswith(placements)}
    assert {code: name for code, (name, _, _) in STATUSES.items()} == codes
    for code, (name, kind, advice) in STATUSES.items():
        error = error_for(code, "nrt_something")
        assert type(error) is kind
        assert error.status == code
        assert str(error) == f"nrt_something failed with {name}: {advice}"
    assert isinstance(error_for(4711, "nrt_something"), NeuronError)
    assert "status 4711" in str(error_for(4711, "nrt_something"))


def test_families_are_the_headers_instances() -> None:
    named = {value: name for name, value in enumerators().items() if name.startswith("NRT_INSTANCE_") and value}
    assert {f"NRT_INSTANCE_{family.upper()}" for family in FAMILIES.values()} == set(named.values())
    assert {number: f"NRT_INSTANCE_{family.upper()}" for number, family in FAMILIES.items()} == named


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="there is no libnrt at"):
        find(tmp_path / "libnrt.so.1")
    (tmp_path / "libnrt.so.1").write_text("no library")
    with pytest.raises(DeviceError, match="aws-neuronx-runtime-lib"):
        Library(tmp_path)


def test_a_library_of_another_kind_is_named(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text('__attribute__((visibility("default"))) int other;\n')
    library = compile_library(source, tmp_path / "other.so", soname="other.so")
    with pytest.raises(DeviceError, match="has no nrt_init"):
        Library(library)


def test_a_library_is_known_by_any_version(tmp_path: Path) -> None:
    """The file behind libnrt.so.1 may be called after the runtime's version."""
    source = tmp_path / "other.c"
    source.write_text('__attribute__((visibility("default"))) int other;\n')
    library = compile_library(source, tmp_path / "libpushkvtest.so.2.34.10", soname="libpushkvtest.so.1")
    assert maps.loaded("libpushkvtest") is None
    handle = ctypes.CDLL(str(library))
    assert handle is not None
    assert maps.loaded("libpushkvtest") == library
