"""Makes the front page that JupyterLab shows. It has no links and no scripts, because JupyterLab opens neither."""

import re
from pathlib import Path

from kvviz.report.notebook import Notebook, read
from kvviz.report.page import Entry, Frame, Link, render_index
from kvviz.report.prose import about, counted

NAME = "front_page.html"


def lab_front_page(notebooks: Path, opening: str) -> str:
    """Return the front page of a folder of notebooks. Equal notebooks give equal bytes.

    Args:
        opening: trusted HTML without scripts that stands first, with a heading of level 1.
    """
    lessons = [read(path) for path in sorted(notebooks.glob("*.ipynb"))]
    reading = sum(lesson.minutes_read or 0 for lesson in lessons)
    together = f"{counted(len(lessons), 'notebook')}, about {reading} min to read. Open them in the list of files."
    frame = Frame(notebooks, {}, "")
    page = render_index([_entry(lesson) for lesson in lessons], frame, "", together, opening)
    page = re.sub(r'<a class="kvr-skip".*?</a>|<script>.*?</script>', "", page, flags=re.DOTALL)
    return re.sub(r"<a\b[^>]*>(.*?)</a>", r"<span>\1</span>", page, flags=re.DOTALL)


def _entry(lesson: Notebook) -> Entry:
    return Entry(
        name=lesson.name,
        title=lesson.title,
        promise=lesson.promise,
        minutes="no time stated" if lesson.minutes_cpu is None else about(lesson.minutes_cpu),
        reading=about(lesson.minutes_read) if lesson.minutes_read else "",
        seconds="",
        ran=False,
        status="",
        link=Link(lesson.path.name, lesson.title),
    )
