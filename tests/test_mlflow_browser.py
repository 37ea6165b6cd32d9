"""What a team sees: MLflow's own UI in a real browser, on a store that the sink wrote."""

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from matplotlib.image import imread
from study_data import budgets, study

from tuner.sinks import pages
from tuner.sinks.mlflow import MlflowSink, embedded
from tuner.sinks.pages import WorkloadFacts

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--window-size=1500,1200",
]
STAR = (0xE6, 0x9F, 0x00)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
    pytest.mark.skipif(not pages.has_ui(), reason="the full mlflow is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's use of SQLAlchemy
]


@dataclass(frozen=True)
class Ui:
    base: str
    experiment: str
    parent: str
    review: str


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    """A study published to an embedded store, and `mlflow server` on it."""
    runs = tmp_path_factory.mktemp("runs")
    uri, artifacts = embedded(runs)
    sink = MlflowSink(
        tracking_uri=uri,
        artifact_root=artifacts,
        study_uid="browser",
        run_folder=runs / "quickstart",
        workload=WorkloadFacts("chat", "ab" * 32, {"requests": 73, "span_s": 30.0}),
        experiment="tiny-qwen2 on chat",
    )
    sink.study_started(study(), [])
    sink.study_ended(budgets())
    assert sink.synced
    port = free_port()
    with server(uri, port, runs / "server.log"):
        base = f"http://127.0.0.1:{port}"
        found = post(
            f"{base}/api/2.0/mlflow/runs/search",
            {"experiment_ids": ["1"], "filter": "tags.`tune.kind` = 'study'"},
        )
        yield Ui(base, "1", found["runs"][0]["info"]["run_id"], str(sink.url(base)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class server:  # noqa: N801 (reads as a context)
    """`mlflow server` on a store, up when entered, gone with its workers when left."""

    def __init__(self, uri: str, port: int, log: Path) -> None:
        self.argv = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            uri,
            "--host",
            "127.0.0.1",
        ]
        self.argv += ["--port", str(port), "--workers", "1"]
        self.port, self.log = port, log

    def __enter__(self) -> None:
        env = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PATH": "/usr/bin:/bin",
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.argv, stdout=out, stderr=out, env=env, cwd=self.log.parent, start_new_session=True
            )
        wait_for(lambda: answers(f"http://127.0.0.1:{self.port}/health"), 90, self.log.read_text)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def wait_for(condition: Callable[[], bool], timeout: float, explain: Callable[[], str]) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.3)


class Page:
    """A tab, driven over Chromium's own protocol: the plot lies in a frame that --dump-dom does not show."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.calls = socket, 0

    async def call(self, method: str, **params: Any) -> Any:
        self.calls += 1
        await self.socket.send_json({"id": self.calls, "method": method, "params": params})
        while True:
            answer = await self.socket.receive_json(timeout=30)
            if answer.get("id") == self.calls:
                assert "error" not in answer, answer
                return answer["result"]

    async def text(self) -> str:
        found = await self.call("Runtime.evaluate", expression="document.body ? document.body.innerText : ''")
        return str(found["result"].get("value", ""))

    async def html(self) -> str:
        found = await self.call("Runtime.evaluate", expression="document.documentElement.outerHTML")
        return str(found["result"]["value"])

    async def png(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Page]:
    """Open a page in a fresh Chromium, which ends with the context."""
    process = subprocess.Popen(  # noqa: ASYNC220
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        note = profile / "DevToolsActivePort"
        wait_for(lambda: note.exists() and "\n" in note.read_text(), 60, lambda: "chromium did not start")
        port = note.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                tabs = [tab for tab in await response.json() if tab["type"] == "page"]
            async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as connected:
                page = Page(connected)
                await page.call("Page.navigate", url=url)
                yield page
    finally:
        process.terminate()
        process.wait(20)


async def shows(page: Page, words: tuple[str, ...], within: float = 60) -> str:
    """Wait until the page has all these words; returns its text."""
    end = time.monotonic() + within
    while True:
        text = await page.text()
        missing = [word for word in words if word not in text]
        if not missing:
            return text
        assert time.monotonic() < end, f"{missing} not in:\n{text}"
        await asyncio.sleep(0.5)


async def shows_colour(page: Page, colour: tuple[int, int, int], within: float = 60) -> int:
    """Wait until pixels of this colour are there; returns how many."""
    end = time.monotonic() + within
    while True:
        pixels = np.rint(imread(io.BytesIO(await page.png()))[..., :3] * 255).astype(int)
        found = int((np.abs(pixels - np.array(colour)).max(axis=-1) <= 2).sum())
        if found > 50 or time.monotonic() > end:
            return found
        await asyncio.sleep(1)


def test_the_parent_page_answers_before_anyone_clicks(ui: Ui, tmp_path: Path) -> None:
    """The run of the study shows the verdict, its trials by short names, and the workload."""

    async def look() -> None:
        url = f"{ui.base}/#/experiments/{ui.experiment}/runs/{ui.parent}?workflowType=machine_learning"
        async with opened(url, tmp_path / "profile") as page:
            text = await shows(page, ("SLO met by 1 of 8 trials", "t00 default", "t04 b256", "t08 l256", "chat"))
            save(await page.png(), "parent")
            assert "recommended, trial 4" in text

    asyncio.run(look())


def test_the_front_is_drawn_in_the_artifact_page(ui: Ui, tmp_path: Path) -> None:
    """The plot runs inside MLflow's page: the recommended trial's star is on the screen."""

    async def look() -> None:
        url = f"{ui.base}/#/experiments/{ui.experiment}/runs/{ui.parent}/artifacts/pareto/pareto.html"
        async with opened(f"{url}?workflowType=machine_learning", tmp_path / "profile") as page:
            await shows(page, ("pareto/pareto.html", "trials.json", "study.yaml", "best"))
            pixels = await shows_colour(page, STAR)
            save(await page.png(), "front")
            assert pixels > 50

    asyncio.run(look())


def test_the_saved_view_lists_the_trials_with_the_columns_that_matter(ui: Ui, tmp_path: Path) -> None:
    """The printed link opens the trials of this study, arguments and both latencies chosen, best ITL first."""

    async def look() -> None:
        async with opened(ui.review, tmp_path / "profile") as page:
            text = await shows(page, ("Pareto review: quickstart", "t06 b128", "t05 b65536", "8 matching runs"))
            await shows(page, ("itl_p99_ms", "max_num_batched"))
            save(await page.png(), "review")
            assert text.index("t06 b128") < text.index("t00 default") < text.index("t05 b65536")
            assert "t07" not in text, "a trial that repeats another is not listed"

    asyncio.run(look())


def test_the_trials_are_a_table(ui: Ui, tmp_path: Path) -> None:
    """`trials.json` is shown as a table with the numbers in it, not as text."""

    async def look() -> None:
        url = f"{ui.base}/#/experiments/{ui.experiment}/runs/{ui.parent}/artifacts/trials.json"
        async with opened(f"{url}?workflowType=machine_learning", tmp_path / "profile") as page:
            text = await shows(page, ("front, recommended", "TTFT p50 long (ms)", "589", "missed by 18 %"))
            save(await page.png(), "table")
            assert '"columns"' not in text

    asyncio.run(look())


def save(png: bytes, name: str) -> None:
    """Keep the picture where TUNE_SCREENSHOTS says, for a person to look at."""
    if folder := os.environ.get("TUNE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.png").write_bytes(png)
