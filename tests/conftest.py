"""What every test may use: the language model's path, a browser, and skips that may be forbidden."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


def gpu_missing() -> str | None:
    """What this machine lacks for tests marked ``gpu``, or None."""
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
    """With ``KVVIZ_REQUIRE_GPU=1``, a ``gpu`` test that is skipped, wherever and why ever, has failed."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and os.environ.get("KVVIZ_REQUIRE_GPU") == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"KVVIZ_REQUIRE_GPU=1 forbids to skip this test, which said: {reason}"
    return report


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The language model's GGUF. Without it the test is skipped, or fails if ``KVVIZ_REQUIRE_MODEL=1``."""
    from kvviz.engine import weights

    try:
        return weights.find()
    except FileNotFoundError as error:
        if os.environ.get("KVVIZ_REQUIRE_MODEL") == "1":
            pytest.fail(f"KVVIZ_REQUIRE_MODEL=1, and: {error}")
        pytest.skip(str(error))


def browser_missing(reason: str) -> None:
    """Skip, or fail where ``KVVIZ_REQUIRE_BROWSER=1`` says that there must be a browser."""
    if os.environ.get("KVVIZ_REQUIRE_BROWSER") == "1":
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
    """Opens a piece of HTML as a page of its own, offline: ``opened(html, width=, scheme=, javascript=, touch=)``.

    What the page asked for, said in dialogs or threw is in its lists ``asked``, ``dialogs`` and ``errors``.
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
