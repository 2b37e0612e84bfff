"""The page of `dlcmd dashboard` in Debian's chromium, beside a put, mounts, a server and a task.

Pictures of it (light, dark, phone) are left in `build/dashboard`.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from diesel_fs.errors import DieselError
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.mounts import MountRequest, mount, umount
from diesel_fs.mounts import stats as stats_of
from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.remote.open import open_repository
from diesel_fs.repository.local import LocalRepository
from tests.cli.dashboards import Dashboard, Object, at, item
from tests.cli.test_dashboard import HOSTILE, free_port
from tests.server.program import Server, new_repository
from tests.trees import write
from tests.waiting import wait_until

TREE = Path(__file__).resolve().parents[2]
PICTURES = TREE / "build" / "dashboard"
AXE = TREE / ".venv" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = "/usr/bin/chromium"

SIZE: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 780}
FILES = {f"class/{number:04}.jpg": os.urandom(20_000) for number in range(1_000)}
MOUNTS = 50


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "store").as_uri()
        self.mounted: list[Path] = []
        self._is_over = threading.Event()
        source = write(folder / "source", FILES)
        options = PutOptions(chunk_bytes=256 << 10, compress="none", jobs=1)
        with LocalRepository.open(self.url, create=True) as repository:
            put(repository, "pets", FolderSource(source), options=options)
            for number in range(999):
                identity = uuid.uuid4()
                repository.meta.create(f"set-{number:03}", identity)
                repository.catalogue.add(f"set-{number:03}", identity, time.time_ns())
        served = (folder / "served").as_uri()
        credentials = new_repository(served)["root"]
        self.metrics = free_port()
        self.server = Server(folder / "run", "--store", served, "--metrics", str(self.metrics))
        self.server.metrics_port  # noqa: B018  # waits until it listens
        self._threads = [
            threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(2)
        ]
        self.read_from = self.mount("imagenet", memory_bytes=12 << 20)
        peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        for rank in range(2):
            kwargs = TaskOptions.from_kwargs(
                {"task": "night", "rank": rank, "world": 2, "peers": peers, "task_key": "k" * 32},
                str(rank),
            )
            self.mount(f"node{rank}", kwargs)

        def put_always() -> None:
            while not self._is_over.is_set():
                with open_repository(self.server.url, credentials) as repository:
                    write(source, {"class/0000.jpg": os.urandom(20_000)})
                    put(repository, "pets", FolderSource(source), options=options)
                self._is_over.wait(0.5)

        self._threads.append(threading.Thread(target=put_always, daemon=True))
        for each in self._threads:
            each.start()

    def mount(
        self, name: str, task: TaskOptions | None = None, memory_bytes: int = 32 << 20
    ) -> Path:
        at = self.folder / name
        request = MountRequest(
            url=self.url, dataset="pets", mountpoint=str(at), memory_bytes=memory_bytes,
            task_options=task or TaskOptions(),
        )  # fmt: skip
        mount(request)
        self.mounted.append(at)
        return at

    def _read(self, rank: int) -> None:
        epoch = 0
        while not self._is_over.is_set():
            name = f"seed=1,epoch={epoch},group=2,rank={rank},world=2"
            order = (self.read_from / ".diesel" / "shuffle" / name).read_text().splitlines()
            for path in order:
                if self._is_over.is_set():
                    return
                (self.read_from / path).read_bytes()
                time.sleep(0.01)
            epoch += 1

    def rest(self) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join(60)

    def close(self) -> None:
        self.rest()
        self.server.close()
        for each in self.mounted:
            with suppress(DieselError):
                umount(each, lazy=True)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("scene"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def board(scene: Scene) -> Iterator[Dashboard]:
    with Dashboard("--url", scene.url, "--server-metrics", str(scene.metrics)) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, board: Dashboard) -> Iterator[Page]:
    """The page, live. A message of the browser's console (an error, a breach of the policy) fails
    the test."""
    context = browser.new_context(viewport=SIZE)
    opened = context.new_page()
    messages: list[str] = []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on("dialog", lambda dialog: messages.append(dialog.message))
    opened.goto(board.url)
    opened.wait_for_selector("#link.live")
    yield opened
    context.close()
    # while no dashboard answers, the browser logs that
    assert [each for each in messages if "net::ERR_" not in each] == []


def check_accessibility(page: Page) -> None:
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    faults = [
        (each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert faults == []


def test_it_shows_waiting_readers(browser: Browser, board: Dashboard, scene: Scene) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = str(scene.read_from)
    wait_until(lambda: len(json.loads(board.get("/history?of=all").body)["time"]) > 4)
    for name, scheme, size in (
        ("light", "light", SIZE), ("dark", "dark", SIZE), ("phone", "light", PHONE),
        ("phone-dark", "dark", PHONE),
    ):  # fmt: skip
        context = browser.new_context(color_scheme=scheme, viewport=size)
        page = context.new_page()
        page.goto(board.url)
        page.wait_for_selector("#link.live")
        page.get_by_role("button", name=path).click()
        page.wait_for_selector("#plan-table tbody tr")
        page.wait_for_function("document.querySelectorAll('#charts path').length > 3")
        assert page.locator("#task-list tbody tr").count() == 2
        assert page.locator("#server-table tbody tr").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        check_accessibility(page)
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, 0)")
        page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
        context.close()


def test_it_can_be_used_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#mount-table .name").first.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail:not([hidden])")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail", state="hidden")
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.reload()
    page.wait_for_selector("#link.live")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_thousand_datasets_are_filtered_and_shown_in_steps(page: Page, board: Dashboard) -> None:
    board.until(lambda state: at(state["datasets"], "count") == 1000)
    page.wait_for_function("document.querySelector('#datasets .count').textContent === '1000'")
    assert page.locator("#dataset-table tbody tr").count() == 25
    page.locator("#more").click()
    assert page.locator("#dataset-table tbody tr").count() == 50
    page.get_by_label("Filter").fill("set-12")
    assert page.locator("#dataset-table tbody tr").count() == 10
    assert page.locator("#datasets .count").inner_text() == "10 of 1000"


def test_fifty_mounts_and_a_hostile_name(page: Page, board: Dashboard, scene: Scene) -> None:
    scene.mount(HOSTILE)
    for number in range(MOUNTS - len(scene.mounted)):
        scene.mount(f"mount-{number:02}")

    def all_live(state: Object) -> bool:
        mounts = [item(state, "mounts", path=_shown(each)) for each in scene.mounted]
        return all(each.get("state") == "live" for each in mounts)

    board.until(all_live)
    page.wait_for_function("document.querySelectorAll('#mount-table tr.lost').length === 0")
    page.wait_for_function(f"document.querySelectorAll('#mount-table tbody tr').length >= {MOUNTS}")
    named = page.locator("#mount-table").get_by_text('<img src=x onerror="alert(1)">').first
    named.wait_for()
    assert page.locator("img").count() == 0
    page.get_by_role("button", name="Read", exact=True).click()
    assert page.locator("th[aria-sort]", has_text="Read").first.is_visible()
    check_accessibility(page)


def _shown(path: Path) -> str:
    return str(path).replace("\n", "\\n").replace("\x1b", "\\x1b")


def test_figures_equal_those_of_stats(page: Page, scene: Scene) -> None:
    """When all is quiet, the next state has the values of `dlcmd stats`."""
    scene.rest()
    page.get_by_role("button", name=str(scene.read_from)).click()

    def counters() -> dict[str, str]:
        found: dict[str, str] = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('#counters dt')]"
            ".map((each) => [each.textContent, each.nextElementSibling.textContent]))"
        )
        return found

    def is_equal() -> bool:
        stats: Object = json.loads(json.dumps(stats_of(scene.read_from)))
        page.wait_for_timeout(50)
        known = counters()
        expected = {
            "reads from memory": at(stats, "reads", "hits"),
            "reads fetched": at(stats, "reads", "misses"),
            "bytes read": at(stats, "reads", "bytes"),
            "bytes fetched": at(stats, "cache", "fetched_bytes"),
            "files pushed": at(stats, "residency", "pushed_entries"),
            "files dropped": at(stats, "residency", "dropped_entries"),
        }
        return all(known.get(name) == f"{value:,}" for name, value in expected.items())

    wait_until(is_equal)


def test_a_lost_server_and_dashboard_are_reported(
    page: Page, scene: Scene, board: Dashboard
) -> None:
    scene.server.kill()
    page.wait_for_selector("#server-table .badge.lost")
    assert "Connection refused" in page.locator("#problems").inner_text()
    board.process.terminate()
    board.process.wait(20)
    page.wait_for_selector("#link.lost")
    assert "the dashboard does not answer" in page.locator("#link").inner_text()
