"""Interactive maps in a real JupyterLab: just run, reopened, not trusted, in a view of their own, exported."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kvviz.__main__ import _opening
from kvviz.report.lab_front_page import lab_front_page
from kvviz.report.page import Frame, render_page
from kvviz.show.describe import describe
from tests.show.hands import MAPS, ask, canvas, hover, place, selected_lines, tips
from tests.show.test_live_map import story

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
CELLS = (
    "from kvviz.show.live_map import MapView\nfrom tests.show.test_live_map import story\n\n"
    "spec, record, result = story()",
    "MapView(record, row_bytes=64)",
)
EXPLORER = (
    "from kvviz.show.explorers import Explorer",
    "Explorer('here', controls=('num_blocks', 'carve'))",
)
NO_NEWS = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
PANEL = "[...window.jupyterapp.shell.widgets('main')].find(one => one.context && one.content.widgets)"
"""The open notebook."""

WAIT_MS = 60_000


class Lab:
    """A JupyterLab server with empty settings, a folder for notebooks, and a new browser page for each visit."""

    def __init__(self, folder: Path, chromium) -> None:
        self.folder, self.notebooks, self.chromium = folder, folder / "notebooks", chromium
        self.token = secrets.token_hex(16)
        self.contexts = []
        private = {
            name: folder / name for name in ("config", "data", "runtime", "ipython", "home", "settings", "spaces")
        }
        for place_ in (self.notebooks, private["config"] / "labconfig", *private.values()):
            place_.mkdir(parents=True, exist_ok=True)
        (private["config"] / "labconfig" / "page_config.json").write_text(json.dumps(NO_NEWS))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")} | {
            "JUPYTER_CONFIG_DIR": str(private["config"]),
            "JUPYTER_DATA_DIR": str(private["data"]),
            "JUPYTER_RUNTIME_DIR": str(private["runtime"]),
            "JUPYTERLAB_SETTINGS_DIR": str(private["settings"]),
            "JUPYTERLAB_WORKSPACES_DIR": str(private["spaces"]),
            "IPYTHONDIR": str(private["ipython"]),
            "HOME": str(private["home"]),
            "PYTHONPATH": str(ROOT),
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={self.port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}"]
        command += [f"--ServerApp.root_dir={self.notebooks}", "--LabApp.expose_app_in_browser=True"]
        command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
        self.log = (folder / "lab.log").open("w")
        self.server = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        for _ in range(600):
            assert self.server.poll() is None, (self.folder / "lab.log").read_text()
            try:
                self.ask("status")
                return
            except OSError:
                time.sleep(0.2)
        pytest.fail(f"JupyterLab did not answer: {(self.folder / 'lab.log').read_text()}")

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        for kernel in self.ask("kernels"):
            self.ask(f"kernels/{kernel['id']}", "DELETE")
        self.server.terminate()
        try:
            self.server.wait(30)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.log.close()

    def ask(self, path: str, method: str = "GET"):
        """Return the answer of the server's API."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    def write(self, name: str, cells: tuple[str, ...]) -> Path:
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.notebooks / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": spec}), path)
        return path

    def open(self, name: str, width: int = 1280):
        """Open a notebook in a new browser context. ``page.errors`` lists the errors of its scripts."""
        context = self.chromium.new_context(viewport={"width": width, "height": 900})
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{self.port}/lab/tree/{name}.ipynb?token={self.token}&reset")
        page.wait_for_function("window.jupyterapp !== undefined")
        page.evaluate("window.jupyterapp.restored.then(() => true)")
        page.wait_for_function(f"{PANEL}?.context.isReady && {PANEL}.content.widgets.length > 0")
        page.evaluate(f"window.jupyterapp.shell.activateById({PANEL}.id)")
        return page


def command(page, name: str, arguments: dict | None = None) -> None:
    page.evaluate("([name, given]) => window.jupyterapp.commands.execute(name, given)", [name, arguments or {}])


def run_all(page, cells: int) -> None:
    """Run the notebook and wait until the last cell has finished."""
    page.wait_for_function(f"() => {PANEL}.sessionContext.session?.kernel?.status === 'idle'")
    command(page, "notebook:run-all-cells")
    page.wait_for_function(
        f"""cells => {PANEL}.content.widgets.slice(0, cells)
            .every(cell => cell.model.executionCount > 0)""",
        arg=cells,
    )


def check_answers(page, n: int = 0) -> None:
    """Check that the nth map shows the text of ``describe`` under the pointer."""
    _, record, _ = story()
    page.wait_for_function(f"n => {MAPS}[n]?.clientWidth > 0", arg=n)
    canvas(page, n).scroll_into_view_if_needed()
    for byte in (17, 200):
        hover(page, byte, n)
        assert tips(page)[n] == list(describe(record, byte))


@pytest.fixture(scope="module")
def lab(chromium, tmp_path_factory):
    """Yield a running JupyterLab."""
    lab = Lab(tmp_path_factory.mktemp("lab"), chromium)
    try:
        lab.wait()
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="module")
def run(lab):
    """Return the page of the notebook ``maps``, which was run and saved in JupyterLab and is still open."""
    path = lab.write("maps", CELLS)
    page = lab.open("maps")
    run_all(page, len(CELLS))
    page.wait_for_selector("canvas[role=application]")
    command(page, "docmanager:save")
    page.wait_for_function(f"() => !{PANEL}.context.model.dirty")
    assert "kvviz" in path.read_text()
    return page


def test_a_map_is_interactive_after_a_run(run):
    _, record, _ = story()
    check_answers(run)
    run.keyboard.down("Control")
    run.mouse.wheel(0, -100)
    run.wait_for_function(f"{MAPS}[0].kvviz.look().zoom > 1")
    run.keyboard.up("Control")
    run.get_by_role("button", name="back to the first view").click()
    run.mouse.click(*place(run, 130))
    assert selected_lines(run) == list(describe(record, 130))
    active = f"{PANEL}.content.activeCellIndex"
    before = run.evaluate(active)
    for key, byte in (("ArrowDown", 194), ("ArrowRight", 195), ("ArrowUp", 131), ("Home", 0), ("End", 1439)):
        run.keyboard.press(key)
        assert ask(run, "selected()") == byte and selected_lines(run) == list(describe(record, byte))
    for key in "+-":
        run.keyboard.press(key)
    assert run.evaluate(active) == before, "the notebook must not react to keys of the map"
    assert run.evaluate(f"{PANEL}.content.widgets.length") == len(CELLS)
    run.locator("[data-kvviz=contested] button").press("Enter")
    assert ask(run, "lit()") == {"state": 1}
    box = run.get_by_label("go to byte")
    box.fill("0x10")
    box.press("Enter")
    assert selected_lines(run) == list(describe(record, 16)) and run.errors == []


def test_a_new_view_of_an_output_is_interactive(run):
    run.evaluate(f"{PANEL}.content.activeCellIndex = 1")
    command(run, "notebook:create-output-view")
    run.wait_for_function(f"{MAPS}.length === 2")
    check_answers(run, 1)
    check_answers(run, 0)
    assert run.errors == []


def test_a_map_follows_the_theme(run):
    """Change the theme often: JupyterLab hides its page for less than a frame during each change."""
    background = f"{MAPS}[0].getContext('2d').getImageData({MAPS}[0].width - 1, 1, 1, 1).data[3]"
    assert run.evaluate(background) == 0
    drawn = f"{MAPS}[0].toDataURL()"
    run.mouse.move(2, 2)
    light = run.evaluate(drawn)
    for _ in range(12):
        command(run, "apputils:change-theme", {"theme": "JupyterLab Dark"})
        run.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
        run.wait_for_function(f"light => {drawn} !== light", arg=light)
        command(run, "apputils:change-theme", {"theme": "JupyterLab Light"})
        run.wait_for_function(f"light => {drawn} === light", arg=light)


def test_a_saved_map_is_interactive_without_a_kernel(lab, run):
    page = lab.open("maps")
    command(page, "notebook:shutdown-kernel")
    assert page.evaluate(f"{PANEL}.content.widgets[1].model.trusted")
    check_answers(page)
    assert page.errors == []


def test_a_notebook_that_is_not_trusted_keeps_the_picture(lab, run):
    saved = (lab.notebooks / "maps.ipynb").read_text().replace("row_bytes=64)", "row_bytes=64 )")
    (lab.notebooks / "stranger.ipynb").write_text(saved)
    page = lab.open("stranger")
    assert not page.evaluate(f"{PANEL}.content.widgets[1].model.trusted")
    image = page.locator(".kvviz-stage img, .jp-OutputArea img").first
    image.wait_for(state="visible")
    assert image.bounding_box()["width"] > 600 and page.locator("canvas[role=application]").count() == 0
    assert "96 contested" in image.get_attribute("alt") and page.get_by_text("96 contested").first.is_visible()
    assert page.errors == []
    swatch = page.locator(".kvviz-swatch").first.evaluate(
        "it => [getComputedStyle(it).backgroundColor, getComputedStyle(it).backgroundImage, it.offsetWidth]"
    )
    assert swatch[2] >= 20 and (swatch[0] != "rgba(0, 0, 0, 0)" or swatch[1] != "none"), swatch
    bullets = page.locator(".kvviz-legend li").first.evaluate("it => getComputedStyle(it).listStyleType")
    assert bullets == "none"


def test_an_exported_page_is_interactive_and_loads_nothing(lab, run, chromium, tmp_path):
    executed = nbformat.read(lab.notebooks / "maps.ipynb", as_version=4)
    target = tmp_path / "maps.html"
    target.write_text(render_page(executed, "Maps", Frame(lab.notebooks, {}, "2020-01-01"), None, None))
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page, asked, errors = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.goto(target.as_uri())
    check_answers(page)
    assert errors == [] and [url for url in asked if not url.startswith("data:")] == [target.as_uri()]
    context.close()


def test_a_slider_changes_map_and_audit(lab):
    lab.write("explorer", EXPLORER)
    page = lab.open("explorer")
    run_all(page, len(EXPLORER))
    page.wait_for_selector("canvas[role=application]")
    words = page.locator(".jp-OutputArea pre").first
    size = f"{MAPS}[0].getAttribute('aria-label')"
    before = page.evaluate(size)
    assert "audit: clean" in words.inner_text() and "cache: 2 blocks" in words.inner_text()
    slider = page.locator(".jupyter-widgets [role=slider], .noUi-handle").first
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_function(
        "[...document.querySelectorAll('.jp-OutputArea pre')].some(p => p.innerText.includes('3 blocks'))"
    )
    page.wait_for_function(f"before => {MAPS}.length === 1 && {size} !== before", arg=before)
    page.locator(".widget-dropdown select").select_option("shape")
    page.wait_for_function(
        "[...document.querySelectorAll('.jp-OutputArea pre')].some(p => /audit: \\d+ findings/.test(p.innerText))"
    )
    page.wait_for_function(f"{MAPS}.length === 1 && {size}.includes('contested')")
    x, y = canvas(page).bounding_box()["x"] + 100, canvas(page).bounding_box()["y"] + 5
    page.mouse.move(x, y)
    assert tips(page)[0][0].startswith("byte ") and page.errors == []


def test_the_workspace_opens_the_front_page_and_notebook_00(lab):
    """``make lab`` imports this workspace. Then JupyterLab opens the front page and notebook 00, and no Launcher."""
    html = lab_front_page(ROOT / "notebooks", _opening(ROOT / "notebooks", scripts=False))
    (lab.notebooks / "front_page.html").write_text(html, encoding="utf-8")
    lab.write("00_check_your_machine", ("1",))
    command = [sys.executable, "-m", "jupyterlab", "workspaces", "import", str(ROOT / "deploy" / "lab_workspace.json")]
    subprocess.run(command, env=lab.environment, check=True, capture_output=True)
    context = lab.chromium.new_context(viewport={"width": 1280, "height": 900})
    lab.contexts.append(context)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"http://127.0.0.1:{lab.port}/lab/workspaces/kvviz?token={lab.token}")
    inside = page.frame_locator("iframe")
    inside.get_by_role("heading", name="Every layer wrote its scales to the same bytes").wait_for()
    assert inside.locator("a").count() == 0
    tabs = page.locator(".jp-mod-searchable, .lm-DockPanel-tabBar .lm-TabBar-tabLabel").all_inner_texts()
    assert "front_page.html" in tabs and any(tab.startswith("00_check") for tab in tabs) and "Launcher" not in tabs
