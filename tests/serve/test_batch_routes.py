"""The routes of files, with a slow store and without a server."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from rayspec.openai.batch import FileObject, Page
from rayspec.serve.batch_routes import add_batch_routes
from rayspec.serve.batch_store import BatchStore, new_id
from rayspec.serve.description import Description
from rayspec.serve.options import LLMConfig, ModelLoadingConfig, ServeOptions


def test_lists_leave_threads_to_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_list(*_: Any, **__: Any) -> Page[FileObject]:
        time.sleep(0.1)
        return Page.of([], 1)

    async def asked() -> float:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://here") as http:
            lists = [asyncio.create_task(http.get("/v1/files")) for _ in range(24)]
            await asyncio.sleep(0.05)
            start_s = time.monotonic()
            await http.get(f"/v1/files/{file_id}/content")
            slowest_s = time.monotonic() - start_s
            assert {answer.status_code for answer in await asyncio.gather(*lists)} == {200}
        return slowest_s

    store = BatchStore.at(str(tmp_path))
    file_id = new_id("file-")
    with store.new_file(file_id, "a", "batch") as content:
        content.write(b"a")
    monkeypatch.setattr(BatchStore, "files", slow_list)
    app, config = FastAPI(), LLMConfig(model_loading_config=ModelLoadingConfig(model_id="demo"))
    no_body: Any = None
    add_batch_routes(app, Description(), ServeOptions(llm_configs=(config,), batches=str(tmp_path)), None, no_body)
    assert asyncio.run(asked()) < 0.8, "all lists take 1.2 s and more"
