"""Reader of text files: a document a line, a paragraph, or a file."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

from steercap.errors import InvalidFile
from steercap.lab.datasets.collecting.readers import MOST_BYTES, FileItem, Reader, ReaderSettings, unpacked, utf8
from steercap.lab.datasets.collecting.readers import lines as lines_of


class Texts(Reader):
    """Reader of UTF-8 text files; `.gz` and `.zst` too. Lines end with a newline, paragraphs with blank lines."""

    suffixes = (".txt", ".text")

    def items(self, path: Path, asked: ReaderSettings) -> Iterator[FileItem]:
        if asked.unit == "line":
            for number, line, read in lines_of(path):
                yield FileItem(f"line {number}", utf8(line), read)
        elif asked.unit == "paragraph":
            yield from _paragraphs(path)
        else:
            yield _whole(path)


def _whole(path: Path) -> FileItem:
    with unpacked(path) as (content, at):
        data = content.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InvalidFile(f"{path} is longer than {MOST_BYTES:,} bytes; read it by unit='line' or 'paragraph'")
        return FileItem("its text", utf8(data.removeprefix(BOM_UTF8)), at())


def _paragraphs(path: Path) -> Iterator[FileItem]:
    held: list[bytes] = []
    number, began, size, read = 0, 1, 0, 0
    with unpacked(path) as (content, at):
        while line := content.readline(MOST_BYTES):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if line.strip():
                began = began if held else number
                held.append(line)
                size += len(line)
                if size >= MOST_BYTES:
                    raise InvalidFile(f"{path}, line {began} begins a paragraph of more than {MOST_BYTES:,} bytes")
            elif held:
                yield FileItem(f"line {began}", utf8(b"".join(held).rstrip(b"\r\n")), at())
                held, size = [], 0
        read = at()
    if held:
        yield FileItem(f"line {began}", utf8(b"".join(held).rstrip(b"\r\n")), read)


MEMBER = Texts()
