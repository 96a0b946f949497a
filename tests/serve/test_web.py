"""The page in a real browser: against answers that an endpoint gives only when something is wrong, and against the
endpoint itself."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from rayspec import LLM, SamplingParams
from rayspec.choices import Choices
from rayspec.demo import sample_documents
from tests.serve.endpoint_process import EndpointProcess

WEB = Path(__file__).parents[2] / "rayspec" / "serve" / "web"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
CHROMEDRIVER = shutil.which("chromedriver")
KEY = "key-of-the-page"
WAIT_S = 60
KINDS = ("attention", "mlp")
HOSTILE = "Grüße, 世界 🌍 <img src=x onerror=\"document.title='run'\"> & <script>document.title='run'</script>"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or CHROMEDRIVER is None, reason="needs Chromium and chromedriver"),
]


class Page:
    """What a visitor sees and does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> Page:
        self.forget_logs()
        self.driver.get(url)
        self.until(lambda: self.find("#model option, #error:not([hidden])"))
        return self

    def forget_logs(self) -> None:
        self.driver.get_log("browser")
        self.driver.get_log("performance")

    def find(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, element_id: str) -> str:
        return self.driver.find_element(By.ID, element_id).get_property("textContent")

    def until(self, holds: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(lambda _: holds())

    def click(self, element_id: str) -> None:
        self.driver.find_element(By.ID, element_id).click()

    def choose(self, model: str) -> None:
        Select(self.driver.find_element(By.ID, "model")).select_by_value(model)

    def fill(self, element_id: str, text: str) -> None:
        field = self.driver.find_element(By.ID, element_id)
        field.clear()
        field.send_keys(text)

    def ask(self, document: str) -> None:
        self.fill("document", document)
        self.click("start")

    def wait_until_done(self) -> None:
        self.until(lambda: self.find("#start:enabled"))

    def num_pieces(self) -> int:
        return int(self.driver.execute_script("return document.getElementById('summary').dataset.numChunks"))

    def cells(self) -> list[str]:
        """The choice in each sublayer's tooltip, in the model's order; of a map of one band."""
        script = """return arguments[0].map(
          (kind) => Array.from(document.querySelectorAll(`.band i.${kind}`), (cell) => cell.title.split(": ")[1]));"""
        choices = self.driver.execute_script(script, KINDS)
        return [choice for layer in zip(*choices, strict=True) for choice in layer]

    def console_errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts_asked(self) -> set[str | None]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        urls = [urlsplit(params["request"]["url"]) for params in sent]
        return {url.hostname for url in urls if url.scheme in {"http", "https", "ws", "wss"}}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Page:
    return Page(driver)


def chunk(text: str | None = None, finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text or ""}, "finish_reason": finish_reason}], **extra}


def event(body: dict[str, Any] | str) -> bytes:
    return f"data: {body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)}\n\n".encode()


ANSWER = b"".join([*(event(chunk(word)) for word in HOSTILE.split(" ")), event(chunk(None, "length"))])
REFUSALS = {"full": 429, "starting": 503}
MARKDOWN = (
    "# Title\nA **bold** and *slanted* `code`:\n\n- one\n- <b>two</b>\n\n1. [three](http://evil)\n```\n* raw\n```\nend"
)
USAGE = event({"choices": [], "usage": {"completion_tokens": 12}})


class Troubled:
    """An endpoint that does what the document says. `num_asked`: how often; `authorization`, `body`: the newest."""

    def __init__(self) -> None:
        self.num_running = 1
        self.body: dict[str, Any] = {}
        self.num_asked: dict[str, int] = {}
        self.authorization: str | None = None
        self.released = threading.Event()
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/status", self.status)
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.app.mount("/", StaticFiles(directory=WEB, html=True))

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name} for name in PLANS]}

    async def status(self) -> dict[str, Any]:
        self._count("status")
        return {"models": [status_of(name, plan) | {"num_running": self.num_running} for name, plan in PLANS.items()]}

    async def chat(self, request: Request) -> Response:
        self.body = await request.json()
        asked = self.body["messages"][0]["content"].split()[-1]
        self._count(asked)
        self.authorization = request.headers.get("authorization")
        if asked in REFUSALS and self.num_asked[asked] % 2:
            return JSONResponse({"error": {"message": "256 wait."}}, REFUSALS[asked], headers={"Retry-After": "1"})
        if asked == "long":
            return JSONResponse({"error": {"message": "The prompt is too long."}}, 400)
        return StreamingResponse(getattr(self, asked)(), media_type="text/event-stream")

    async def full(self) -> AsyncIterator[bytes]:
        yield event(chunk("there is room again"))
        yield event("[DONE]")

    starting = full

    async def held(self) -> AsyncIterator[bytes]:
        while not self.released.is_set():
            await asyncio.sleep(0.01)
        yield event(chunk(MARKDOWN))
        yield event({"choices": [], "usage": {"completion_tokens": 40}})
        yield event("[DONE]")

    async def compared(self) -> AsyncIterator[bytes]:
        """Without drafts a third as fast."""
        for word in ("one ", "two ", "three"):
            yield event(chunk(word))
            await asyncio.sleep(0.2 if self.body["use_drafts"] else 0.6)
        yield USAGE
        yield event("[DONE]")

    async def changed(self) -> AsyncIterator[bytes]:
        for word in ("one ", "two" if self.body["use_drafts"] else "three"):
            yield event(chunk(word))
            await asyncio.sleep(0.1)
        yield USAGE
        yield event("[DONE]")

    async def endless(self) -> AsyncIterator[bytes]:
        for number in range(2 if self.body["use_drafts"] else 10**6):
            yield event(chunk(f"{number} "))
            await asyncio.sleep(0.1)
        yield USAGE
        yield event("[DONE]")

    async def bytewise(self) -> AsyncIterator[bytes]:
        for byte in ANSWER + USAGE + event("[DONE]"):
            yield bytes([byte])
            await asyncio.sleep(0)

    async def broken(self) -> AsyncIterator[bytes]:
        yield event(chunk("so far "))
        yield event({"error": {"message": "a stage was lost", "type": "server_error"}})
        yield event("[DONE]")

    async def cut(self) -> AsyncIterator[bytes]:
        yield event(chunk("so far "))
        await asyncio.sleep(0.1)
        raise ConnectionResetError  # uvicorn closes the connection without the last chunk

    def _count(self, what: str) -> None:
        self.num_asked[what] = self.num_asked.get(what, 0) + 1


def plan_of(choices: Choices, num_draft_tokens: int) -> dict[str, Any]:
    return {"choices": choices, "num_draft_tokens": num_draft_tokens, "source": "knapspec", "reason": "first"}


PLANS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "demo": None,
    "small": plan_of(("full", "skip", "int4", "full", "skip", "skip", "full", "int4+pages"), 4),
}


def status_of(name: str, plan: dict[str, Any] | None) -> dict[str, Any]:
    rates = {"tokens_per_s": 12.34, "acceptance_rate": 0.876, "mean_accepted_length": 3.456} if plan else {}
    return {
        "model": name,
        "num_sublayers": len(plan["choices"]) if plan else 8,
        "num_running": 1,
        "num_waiting": 2,
        "kv_used_tokens": 50,
        "kv_total_tokens": 200,
        "gate_reason": "drafting is on (measured 1.50x plain decoding, predicted 1.40x)",
        "plan": plan,
        "version": "1.2.3",
        "tokens_per_s": None,
        "acceptance_rate": None,
        "mean_accepted_length": None,
        **rates,
    }


@pytest.fixture(scope="module")
def troubled_server() -> Iterator[tuple[Troubled, str]]:
    troubled = Troubled()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(troubled.app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield troubled, f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(WAIT_S)


@pytest.fixture
def troubled(troubled_server: tuple[Troubled, str], page: Page) -> Troubled:
    page.open(troubled_server[1])
    return troubled_server[0]


def test_the_sample_is_a_bundled_report() -> None:
    assert (WEB / "sample.txt").read_text(encoding="utf-8") == sample_documents(1, num_sentences=40)[0].text


def test_text_arrives_whole_and_stays_text_and_the_key_goes_nowhere_else(troubled: Troubled, page: Page) -> None:
    page.fill("api-key", KEY)
    page.ask("bytewise")
    page.wait_until_done()
    assert page.text("summary") == HOSTILE.replace(" ", "")
    assert page.num_pieces() == len(HOSTILE.split(" "))
    assert [element.tag_name for element in page.find("#summary *")] == ["p"]
    assert page.driver.title == "rayspec: summarize documents"
    assert page.text("outcome").startswith("12 tokens in ")
    assert page.text("outcome").endswith("cut at max tokens")
    assert page.text("first-token").endswith(" s")
    assert page.console_errors() == []
    assert page.hosts_asked() == {"127.0.0.1"}
    assert troubled.authorization == f"Bearer {KEY}"
    assert KEY not in page.driver.current_url
    kept = page.driver.execute_script("return [localStorage.length, sessionStorage.length, document.cookie]")
    assert kept == [0, 0, ""]


@pytest.mark.parametrize(("asked", "why"), [("full", "the endpoint is full"), ("starting", "the model is starting")])
def test_a_full_or_starting_endpoint_is_asked_again_in_time(
    troubled: Troubled, page: Page, asked: str, why: str
) -> None:
    page.ask(asked)
    page.until(lambda: page.text("outcome") == f"{why}; trying again in 1 s")
    page.wait_until_done()
    assert page.text("summary") == "there is room again"
    assert troubled.num_asked[asked] == 2


def test_a_second_try_can_be_stopped(troubled: Troubled, page: Page) -> None:
    troubled.num_asked["full"] = 2
    page.ask("full")
    page.until(lambda: "trying again" in page.text("outcome"))
    page.click("stop")
    page.wait_until_done()
    assert page.text("outcome") == "stopped"
    assert troubled.num_asked["full"] == 3


@pytest.mark.usefixtures("troubled")
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("broken", "The summary broke off: a stage was lost"),
        ("cut", "The connection was lost before the summary was complete."),
    ],
)
def test_what_breaks_a_summary_is_said_and_its_beginning_stays(page: Page, trouble: str, message: str) -> None:
    page.ask(trouble)
    page.wait_until_done()
    assert page.driver.find_element(By.ID, "error").is_displayed()
    assert page.text("error").startswith(message)
    assert page.text("summary") == "so far "
    page.ask("bytewise")
    page.wait_until_done()
    assert not page.driver.find_element(By.ID, "error").is_displayed()


@pytest.mark.usefixtures("troubled")
def test_the_choice_map_shows_the_plan_of_the_chosen_model(page: Page) -> None:
    page.choose("small")
    said = "of 8 sublayers, drafts run 3 in full, skip 3, run 1 with int4, run 1 with int4+pages; up to 4 tokens"
    page.until(lambda: page.text("plan") == said)
    assert page.cells() == list(PLANS["small"]["choices"])
    drawn = [len(page.find(f"#skip-map i.{state}")) for state in ("kept", "cheap", "skipped", "unknown")]
    assert drawn == [3, 2, 3, 0]
    label = page.find("#skip-map")[0].get_attribute("aria-label")
    assert label == (
        "How the draft runs sublayers. full: attention of layers 0, 3, MLP of layers 1; "
        "skip: attention of layers 2, MLP of layers 0, 2; int4: attention of layers 1; "
        "int4+pages: MLP of layers 3."
    )
    assert [page.text(name) for name in ("acceptance", "accepted-length", "tokens-per-s")] == ["88%", "3.46", "12.3"]
    assert page.text("load") == "1 running, 2 waiting, KV cache 25% used"
    assert page.text("gate") == "Drafting is on (measured 1.50x plain decoding, predicted 1.40x)"
    page.choose("without")
    page.until(lambda: page.text("plan").startswith("no plan yet: the model searches one after"))
    assert len(page.find("#skip-map i.unknown")) == 8
    assert page.text("acceptance") == "\N{EN DASH}"
    assert not page.driver.find_element(By.ID, "only-reports").is_displayed()
    page.choose("demo")
    page.until(lambda: page.driver.find_element(By.ID, "only-reports").is_displayed())


def test_files_are_summarized_one_after_the_other_and_stay(troubled: Troubled, page: Page, tmp_path: Path) -> None:
    names = {"a.txt": "long", "b.md": "held", "c.pdf": "%PDF"}
    for name, text in names.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    page.driver.find_element(By.ID, "files").send_keys("\n".join(str(tmp_path / name) for name in names))
    page.until(lambda: len(page.find("#documents button")) == 2)
    assert "c.pdf: only .txt and .md files are read here." in page.text("error")
    page.click("start")
    page.until(lambda: page.text("waiting").startswith("Waiting for the first token: "))
    page.until(lambda: page.text("waiting").endswith(" s; 2 requests wait at the endpoint"))
    troubled.released.set()
    page.wait_until_done()
    assert [button.text.split() for button in page.find("#documents button")] == [["a.txt", "failed"], ["b.md", "done"]]
    tags = ["h3", "p", "strong", "em", "code", "ul", "li", "li", "ol", "li", "pre", "p"]
    assert [element.tag_name for element in page.find("#summary *")] == tags
    assert page.text("summary").endswith("one<b>two</b>[three](http://evil)* rawend")
    figures = page.text("first-token"), page.text("own-rate")
    assert "\N{EN DASH}" not in figures
    page.find("#documents button")[0].click()
    assert (page.text("summary"), page.text("error")) == ("", "The prompt is too long.")
    assert (page.text("first-token"), page.text("own-rate")) == figures
    page.find("#documents button")[1].click()
    page.driver.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("copy")
    page.until(lambda: page.text("outcome") == "copied")
    assert page.driver.execute_script("return window.copied") == MARKDOWN
    assert all(" 400 " in error for error in page.console_errors())


@pytest.mark.parametrize("num_running", [1, 2])
def test_a_summary_is_compared_with_plain_decoding(troubled: Troubled, page: Page, num_running: int) -> None:
    troubled.num_running = num_running
    assert page.find("#compare:disabled")
    page.ask("compared")
    page.wait_until_done()
    request = troubled.body
    page.driver.find_element(By.ID, "compare").send_keys("\n")
    page.until(lambda: page.text("comparison") == "Decoding the same request without drafts …")
    assert page.driver.find_element(By.ID, "compared").is_displayed()
    page.until(lambda: "plain decoding (" in page.text("comparison"))
    assert (request["use_drafts"], troubled.body) == (True, request | {"use_drafts": False})
    speed_up, said = page.text("comparison").split("x", 1)
    assert 2 < float(speed_up) < 4
    busy = " Other requests ran at the same time: a busy endpoint has other speeds." if num_running > 1 else ""
    assert re.sub(r"\d+\.\d", "N", said) == f" faster than plain decoding (N and N tokens/s), same text.{busy}"
    assert page.text("speed-up") == f"{speed_up}x"
    assert page.text("speed-up-of") == "over plain decoding, measured with the last comparison"
    assert page.driver.switch_to.active_element.get_attribute("id") == "compare"
    assert not page.driver.find_element(By.ID, "compared").is_displayed()
    assert page.text("summary") == "one two three"
    troubled.num_running = 1
    page.ask("changed")
    page.wait_until_done()
    assert page.text("comparison") == ""
    page.click("compare")
    page.until(lambda: "but the texts differ. In 16 bits, " in page.text("comparison"))
    page.find("#documents button")[0].click()
    assert page.text("comparison").split("x", 1) == [speed_up, said]
    page.ask("changed")
    page.wait_until_done()
    page.click("compare")
    page.until(lambda: page.text("comparison").endswith(" Drafts could copy from the earlier summary of this text."))
    assert page.console_errors() == []


@pytest.mark.usefixtures("troubled")
@pytest.mark.parametrize("button", ["stop", "compare"])
def test_a_comparison_can_be_stopped(page: Page, button: str) -> None:
    page.ask("endless")
    page.wait_until_done()
    page.click("compare")
    page.until(lambda: page.text("compare") == "Stop comparing")
    page.click(button)
    page.until(lambda: page.text("comparison") == "Comparison stopped.")
    assert page.text("compare") == "Compare with plain decoding"
    assert page.find("#start:enabled")
    assert page.text("summary") == "0 1 "


@pytest.mark.usefixtures("troubled")
def test_on_a_phone_the_summary_comes_into_view_and_nothing_is_wider(page: Page) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.choose("small")
        page.ask("bytewise")
        page.wait_until_done()
        top = "return document.getElementById('summary-heading').getBoundingClientRect().top"
        page.until(lambda: 0 <= page.driver.execute_script(top) < 500)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.ray
def test_a_summary_streams_in(demo_endpoint: EndpointProcess, llm: LLM, page: Page) -> None:
    document = sample_documents(1, num_sentences=40)[0].text
    page.open(f"{demo_endpoint.url}/").click("sample")
    page.until(lambda: page.text("size"))
    page.click("start")
    page.wait_until_done()
    params = SamplingParams(temperature=0.0, max_tokens=256)
    (output,) = llm.chat([{"role": "user", "content": document}], params)
    assert page.text("summary") == output.outputs[0].text
    assert page.num_pieces() > 1
    assert page.text("outcome").startswith(f"{len(output.outputs[0].token_ids)} tokens in ")
    (now,) = demo_endpoint.status()

    def shows_the_plan() -> bool:
        """A plan comes only where a draft may pay."""
        plan = demo_endpoint.status()[0]["plan"]
        return page.cells() == (plan["choices"] if plan else ["unknown"] * now["num_sublayers"])

    page.until(shows_the_plan)
    assert len(page.find("#skip-map i")) == now["num_sublayers"]
    page.until(lambda: page.text("gate").lower() == demo_endpoint.status()[0]["gate_reason"].lower())
    page.click("compare")
    page.until(lambda: " plain decoding (" in page.text("comparison"))
    assert page.text("comparison").endswith(" tokens/s), same text.")
