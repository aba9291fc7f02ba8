"""Our declarations of libcuda, the stand-in, and NVIDIA's header: one and the same."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from gpu_compat.declarations import FUNCTIONS, OPTIONAL, REQUIRED, TYPES, ffi
from gpu_compat.status import ADVICE, NAMES, error_for
from tests.fakes.cuda import compile_cuda


def header_folder() -> str:
    """The folder of ``cuda.h``: as the environment says, else the copy that triton, which comes with torch, has."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(place) / "backends/nvidia/include" for place in (spec and spec.submodule_search_locations) or ()]
    found = [str(folder) for folder in folders if (folder / "cuda.h").is_file()]
    return os.environ.get("PUSHKV_CUDA_INCLUDE") or (found[0] if found else "")


HEADERS = header_folder()
needs_header = pytest.mark.skipif(not HEADERS, reason="needs cuda.h: set PUSHKV_CUDA_INCLUDE to its folder")


NEWER = {
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
    "CUDA_ERROR_CONTAINED",
    "CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE",
}
"""Constants that the headers of CUDA 12 have not got, or not all of them."""


def constants() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b(CU\w+) = (\d+)", TYPES)}


def program(functions: str = FUNCTIONS, values: dict[str, int] | None = None) -> str:
    """Compiles if our functions, types and constants are the header's: a function declared twice must have one type.

    The header's macros give a function's plain name to its newest version; what we declare are the exported names.
    """
    lines = ["#include <stdint.h>", "#include <cuda.h>", functions]
    lines += [f'_Static_assert((int)({name}) == {value}, "{name}");' for name, value in (values or constants()).items()]
    for kind in ("CUdevice", "CUdeviceptr", "CUmemGenericAllocationHandle", "CUcontext", "CUstream", "CUevent"):
        (declared,) = re.findall(rf"typedef ([^;]*[ *]){kind};", TYPES)
        lines.append(f'_Static_assert(_Generic(({kind})0, {declared}: 1, default: 0), "{kind}");')
    return "\n".join(lines) + "\n"


def compiles(text: str, folder: str = HEADERS) -> subprocess.CompletedProcess[str]:
    command = [os.environ.get("CC", "cc"), "-std=c11", "-fsyntax-only", f"-I{folder}", "-x", "c", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def header() -> str:
    return (Path(HEADERS) / "cuda.h").read_text()


@needs_header
def test_declarations_are_the_headers() -> None:
    text = header()
    known = {name: value for name, value in constants().items() if re.search(rf"\b{name}\b", text)}
    assert set(constants()) - set(known) <= NEWER
    done = compiles(program(values=known))
    assert done.returncode == 0, done.stderr


@needs_header
@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        ("unsigned char uc, size_t N", "unsigned int uc, size_t N"),
        (
            "cuMemGetHandleForAddressRange(\n    void *handle, CUdeviceptr",
            "cuMemGetHandleForAddressRange(int *handle, CUdeviceptr",
        ),
        ("uint32_t value", "uint64_t value"),
        ("CUresult cuEventRecord", "void cuEventRecord"),
    ],
)
def test_a_wrong_declaration_is_found(ours: str, wrong: str) -> None:
    assert FUNCTIONS.count(ours) >= 1
    assert "conflicting types" in compiles(program(FUNCTIONS.replace(ours, wrong))).stderr


@needs_header
def test_a_wrong_constant_is_found() -> None:
    done = compiles(program(values={**constants(), "CU_POINTER_ATTRIBUTE_RANGE_SIZE": 11}))
    assert "CU_POINTER_ATTRIBUTE_RANGE_SIZE" in done.stderr


@needs_header
def test_all_exported_names_are_the_headers() -> None:
    """A name of a version that the header doesn't have would compile as a function of its own."""
    text = header()
    assert not [name for name in (*REQUIRED, *OPTIONAL) if not re.search(rf"\b{name}\b", text)]


@needs_header
def test_the_stand_in_compiles_against_the_header(tmp_path: Path) -> None:
    assert compile_cuda(tmp_path, headers=Path(HEADERS)).is_file()


def test_every_function_is_declared_once() -> None:
    names = re.findall(r"\b(cu\w+)\(", FUNCTIONS)
    assert len(set(names)) == len(names) == FUNCTIONS.count(";")
    assert set(names) == {*REQUIRED, *OPTIONAL}


def test_every_status_has_a_name_and_an_advice() -> None:
    assert set(ADVICE) == set(NAMES) - {0}
    for status, name in NAMES.items():
        if status:
            assert str(error_for(status, "cuSomething")) == f"cuSomething failed with {name}: {ADVICE[status]}"
    assert "status 4711" in str(error_for(4711, "cuSomething"))


def test_constants_are_what_cffi_made_of_them() -> None:
    assert ffi.typeof("CUresult").relements["CUDA_ERROR_NOT_SUPPORTED"] == constants()["CUDA_ERROR_NOT_SUPPORTED"]
    assert ffi.typeof("CUpointer_attribute").relements["CU_POINTER_ATTRIBUTE_RANGE_SIZE"] == 12
