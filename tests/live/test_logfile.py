from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from llama_process import until

from onebit_serve.live.logfile import LogFile

LINE = b"0123456789abcde\n"  # 16 bytes


class Made:
    def __init__(self, path: Path, **settings):
        self.path = path
        self.said: list[str] = []
        self.told = threading.Event()
        self.file = LogFile(
            path,
            on_trouble=self.tell,
            **{"limit_bytes": 0, "keep": 2, "retry_s": 0.0, **settings},
        )

    def tell(self, line):
        self.said.append(line)
        self.told.set()

    def wait_told(self):
        assert self.told.wait(10), "nothing was said"
        self.told.clear()


@pytest.fixture
def made(tmp_path):
    opened = []

    def make(name="out.log", **settings):
        opened.append(Made(tmp_path / name, **settings))
        return opened[-1]

    yield make
    for one in opened:
        one.file.close()


def texts(path):
    return [file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*"))]


def test_what_is_written_is_there_after_close(made):
    one = made("new/folder/out.log")
    one.file.write(b"a\nb")
    one.file.write(b"c\n")
    one.file.close()
    assert one.path.read_bytes() == b"a\nbc\n"
    assert not one.said


def test_an_old_file_is_continued(made, tmp_path):
    (tmp_path / "out.log").write_bytes(b"old\n")
    one = made()
    one.file.write(b"new\n")
    one.file.close()
    assert one.path.read_bytes() == b"old\nnew\n"


@pytest.mark.parametrize("blocks", [[LINE] * 20, [LINE * 20], [LINE * 3 + LINE[:5], LINE[5:] * 1]])
def test_a_full_file_turns_over_between_lines(made, blocks):
    one = made(limit_bytes=50, keep=9)
    for block in blocks:
        one.file.write(block)
    one.file.close()
    files = texts(one.path)
    assert len(files) > 1
    assert all(len(text) <= 50 for text in files)
    newest_first = b"".join(reversed(files)) if len(files) < 10 else b""
    assert newest_first == b"".join(blocks)
    assert all(text.endswith(b"\n") for text in files[1:])


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_only_so_many_full_files_are_kept(made, keep):
    one = made(limit_bytes=32, keep=keep)
    for _ in range(40):
        one.file.write(LINE)
    one.file.close()
    assert len(texts(one.path)) == keep + 1
    assert sum(map(len, texts(one.path))) <= 32 * (keep + 1)


def test_a_line_longer_than_a_file_ends_up_somewhere(made):
    one = made(limit_bytes=10, keep=20)
    one.file.write(b"x" * 35 + b"\n")
    one.file.close()
    assert b"".join(reversed(texts(one.path))) == b"x" * 35 + b"\n"


def test_a_full_disk_is_said_once_and_got_over(made, tmp_path):
    place = tmp_path / "out.log"
    place.symlink_to("/dev/full")
    one = made()
    one.file.write(b"lost\n")
    one.wait_told()
    for _ in range(10):
        one.file.write(b"lost\n")
    until(lambda: not one.file._held, "the buffer to be empty")
    assert len(one.said) == 1
    assert "No space left on device" in one.said[0]
    assert str(place) in one.said[0]
    place.unlink()
    one.file.write(b"back\n")
    one.wait_told()
    one.file.close()
    assert one.said[1:] == [f"{place} is written again"]
    assert one.path.read_bytes() == b"\n1bit serve: 55 bytes are missing here\nback\n"


def test_a_folder_that_cannot_be_made_stops_nobody(made, tmp_path):
    (tmp_path / "file").write_text("")
    one = made("file/out.log")
    one.file.write(b"x")
    one.wait_told()
    one.file.close()
    assert one.said[0].startswith(f"cannot write {one.path}: ")


def test_while_it_cannot_be_written_it_is_not_tried_all_the_time(made, tmp_path, monkeypatch):
    (tmp_path / "out.log").symlink_to("/dev/full")
    one = made(retry_s=1000.0)
    one.file.write(b"x")
    one.wait_told()
    opened, real = [], os.open

    def counted(*arguments):
        opened.append(arguments)
        return real(*arguments)

    monkeypatch.setattr("onebit_serve.live.logfile.os.open", counted)
    for _ in range(100):
        one.file.write(b"x")
    until(lambda: not one.file._held, "the buffer to be empty")
    assert not opened


def test_a_file_that_was_moved_away_is_opened_anew(made, tmp_path):
    one = made()
    one.file.write(b"before\n")
    until(lambda: one.path.exists() and one.path.read_bytes(), "the first line")
    one.path.rename(tmp_path / "moved")
    one.file.write(b"after\n")
    one.file.close()
    assert (tmp_path / "moved").read_bytes() == b"before\n"
    assert one.path.read_bytes() == b"after\n"


def test_a_flood_faster_than_the_disk_is_bounded_and_counted(made, tmp_path):
    os.mkfifo(tmp_path / "out.log")  # a disk that hangs: opening a pipe waits for its reader
    one = made()
    block = b"x" * 65535 + b"\n"
    for _ in range(1000):  # 64 MB
        one.file.write(block)
    assert one.file._held_bytes <= 4 << 20
    with (tmp_path / "out.log").open("rb") as reader:
        threading.Thread(target=one.file.close, args=(30,)).start()
        text = reader.read()
    lost = 65536 * 1000 - text.count(b"x") // 65535 * 65536
    assert lost > 50 << 20
    assert b"%d bytes are missing here" % lost in text


def test_close_does_not_wait_for_ever(made, tmp_path):
    os.mkfifo(tmp_path / "out.log")
    one = made()
    one.file.write(b"x")
    one.file.close(0.01)
    with (tmp_path / "out.log").open("rb") as reader:  # let the thread end
        assert reader.read() == b"x"
