"""The benchmark's proxy against engines that only write down what they are sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

web = pytest.importorskip("aiohttp.web", reason="aiohttp comes with vLLM")
test_utils = pytest.importorskip("aiohttp.test_utils")

from benchmarks.serving import proxy  # noqa: E402

SOURCE = {"remote_engine_id": "prefill", "remote_host": "127.0.0.1", "remote_port": 7, "tp_size": 1, "pp_size": 1}
ANSWERED = {"do_remote_prefill": True, "remote_request_id": "cmpl-x", "remote_block_ids": [[1, 2]]}


class Engine:
    """Answers when it may, and keeps what it was asked."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.may_answer = asyncio.Event()
        self.was_asked = asyncio.Event()
        self._answer = answer

    async def handle(self, request: Any) -> Any:
        self.asked.append(await request.json())
        self.names.append(request.headers["X-Request-Id"])
        self.was_asked.set()
        await self.may_answer.wait()
        return web.json_response(self._answer)


async def ask(order: str, folder: Path, wait_for_both: bool) -> tuple[Engine, Engine, Any]:
    prefill, decode = Engine({"kv_transfer_params": ANSWERED}), Engine({"text": "done"})
    servers = []
    for engine in (prefill, decode):
        app = web.Application()
        app.router.add_post("/v1/completions", engine.handle)
        servers.append(test_utils.TestServer(app))
    for server in servers:
        await server.start_server()
    urls = [str(server.make_url("")).rstrip("/") for server in servers]
    settings = {"order": order, "source": SOURCE, "log": str(folder / "log"), "prefill": urls[0], "decode": urls[1]}
    async with test_utils.TestClient(test_utils.TestServer(proxy.application(settings))) as client:
        body = {"prompt": [1, 2], "max_tokens": 5, "stream": True}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            if wait_for_both:
                await decode.was_asked.wait()
            await prefill.was_asked.wait()
            prefill.may_answer.set()
            decode.may_answer.set()
            answer = await (await asking).json()
    for server in servers:
        await server.close()
    return prefill, decode, answer


def test_push_gets_both_legs_at_once_under_one_name(tmp_path: Path) -> None:
    prefill, decode, answer = asyncio.run(ask("together", tmp_path, wait_for_both=True))
    assert answer == {"text": "done"}
    assert prefill.names == decode.names
    (leg,) = prefill.asked
    assert (leg["max_tokens"], "stream" in leg) == (1, False)
    assert leg["kv_transfer_params"]["do_remote_decode"]
    (leg,) = decode.asked
    assert (leg["max_tokens"], leg["stream"]) == (5, True)
    assert SOURCE.items() <= leg["kv_transfer_params"].items()
    assert leg["kv_transfer_params"]["remote_request_id"] == decode.names[0]
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert {"request", "prefill", "first"} == json.loads(line).keys()


def test_pull_gets_what_prefill_has_answered(tmp_path: Path) -> None:
    prefill, decode, _ = asyncio.run(ask("prefill first", tmp_path, wait_for_both=False))
    assert len(prefill.asked) == 1
    (leg,) = decode.asked
    assert ANSWERED.items() <= leg["kv_transfer_params"].items()
