"""Files are written whole, and leftovers of killed processes are removed."""

import os
import threading

import pytest

from kvviz.files import STALE_SECONDS, part_file, remove_stale, write_whole


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "page.html"
    assert write_whole(path, b"one") == 3
    assert write_whole(path, b"three") == 5
    assert path.read_bytes() == b"three" and names(tmp_path) == ["page.html"]


def test_an_error_keeps_the_old_file_and_removes_the_part_file(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, b"old")
    with pytest.raises(RuntimeError), part_file(path) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and names(tmp_path) == ["page.html"]


def test_a_folder_in_the_place_of_the_file_is_an_error_without_leftovers(tmp_path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "page.html", b"new")
    assert names(tmp_path) == ["page.html"]


def test_threads_that_write_one_file_leave_one_whole_file(tmp_path):
    path = tmp_path / "page.html"
    texts = [bytes([65 + n]) * 100_000 for n in range(4)]
    threads = [threading.Thread(target=write_whole, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in texts and names(tmp_path) == ["page.html"]


def test_the_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "whole", b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_only_old_leftovers_of_the_pattern_are_removed(tmp_path):
    for name in ("old.part", "young.part", "old.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.part" / "inner").mkdir(parents=True)
    for name in ("old.part", "old.txt", "folder.part"):
        os.utime(tmp_path / name, (0, 0))
    remove_stale(tmp_path, "*.part", STALE_SECONDS)
    assert names(tmp_path) == ["old.txt", "young.part"]


def test_a_link_is_removed_and_its_target_stays(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "link.part").symlink_to(tmp_path / "work")
    os.utime(tmp_path / "link.part", (0, 0), follow_symlinks=False)
    remove_stale(tmp_path, "*.part", STALE_SECONDS)
    assert names(tmp_path) == ["work"]
