"""What every test may use: the model's path, a browser, skips that can be forbidden, and a clean environment."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

REQUIREMENTS = ("KVVIZ_REQUIRE_GPU", "KVVIZ_REQUIRE_MODEL", "KVVIZ_REQUIRE_BROWSER")
"""Variables of the caller that turn skips into failures. They are read once, when pytest starts."""

CALLERS = (*REQUIREMENTS, "KVVIZ_NOTEBOOKS", "MPLBACKEND", "IPYTHONDIR", "NO_COLOR", "FORCE_COLOR", "PYTHONWARNINGS")
"""Variables of the caller that could change what a test sees. Tests and their child processes run without them."""

REQUIRED = frozenset(name for name in REQUIREMENTS if os.environ.get(name) == "1")

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""True in each of the processes that pytest-xdist starts."""


def pytest_configure() -> None:
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # ignored under nohup or in the background, and processes inherit that
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if IS_WORKER:  # each of the processes has one core, and so have its notebooks
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Remove the variables :data:`CALLERS` while tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLERS:
            patch.delenv(name, raising=False)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist, start the files with notebooks first, and then the files with browser tests.

    A notebook takes minutes. If notebooks ran last, one process would be idle in the end.
    """
    if IS_WORKER:
        slow = [{item.path for item in items if item.get_closest_marker(kind)} for kind in ("notebook", "browser")]
        items.sort(key=lambda item: [item.path not in files for files in slow])


def gpu_missing() -> str | None:
    """Return what this machine lacks for tests marked ``gpu``. Return None if nothing is missing."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    from kvviz.kernels import runtime

    if runtime.prepare() == "interpreter":
        import torch

        return "TRITON_INTERPRET is set" if torch.cuda.is_available() else "torch sees no NVIDIA GPU"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        missing = gpu_missing()
        if missing:
            pytest.skip(f"needs a GPU: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> pytest.TestReport:
    """With ``KVVIZ_REQUIRE_GPU=1``, turn each skip of a ``gpu`` test into a failure."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and "KVVIZ_REQUIRE_GPU" in REQUIRED:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"KVVIZ_REQUIRE_GPU=1 forbids to skip this test. The reason of the skip: {reason}"
    return report


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The language model's GGUF. Without it the test is skipped, or fails if ``KVVIZ_REQUIRE_MODEL=1``."""
    from kvviz.engine import weights

    try:
        return weights.find()
    except FileNotFoundError as error:
        if "KVVIZ_REQUIRE_MODEL" in REQUIRED:
            pytest.fail(f"KVVIZ_REQUIRE_MODEL=1, and: {error}")
        pytest.skip(str(error))


def browser_missing(reason: str) -> None:
    """Skip, or fail if ``KVVIZ_REQUIRE_BROWSER=1``."""
    if "KVVIZ_REQUIRE_BROWSER" in REQUIRED:
        pytest.fail(f"KVVIZ_REQUIRE_BROWSER=1, and {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """A headless Chromium. Without one the test is skipped, or fails if ``KVVIZ_REQUIRE_BROWSER=1``."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser_missing("the package playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        browser_missing("there is no chromium on the PATH")
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=options)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium) -> Iterator:
    """A function that opens HTML as a page, offline: ``opened(html, width=, scheme=, javascript=, touch=)``.

    The page's lists ``asked``, ``dialogs`` and ``errors`` contain its requests, its dialogs and its errors.
    """
    contexts = []

    def open_page(html: str, width: int = 1280, scheme: str = "light", javascript: bool = True, touch: bool = False):
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            offline=True,
            java_script_enabled=javascript,
            has_touch=touch,
        )
        contexts.append(context)
        page = context.new_page()
        page.asked, page.dialogs, page.errors = [], [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("dialog", lambda dialog: page.dialogs.append(dialog.message) or dialog.dismiss())
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.set_content(f'<!DOCTYPE html><meta charset="utf-8"><body>{html}</body>')
        return page

    yield open_page
    for context in contexts:
        context.close()
