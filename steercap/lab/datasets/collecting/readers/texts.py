"""Readers of texts (a document a line, a paragraph or a file), and of JSON lines."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.errors import InvalidFile
from steercap.lab.datasets.collecting.readers import (
    MOST_BYTES,
    Bad,
    FileItem,
    Reader,
    ReaderSettings,
    half_of_pair,
    lines,
    unpacked,
    utf8,
)


class Texts(Reader):
    """Reader of UTF-8 text files; `.gz` and `.zst` too. Lines end with a newline, paragraphs with blank lines."""

    suffixes = (".txt", ".text")

    def items(self, path: Path, asked: ReaderSettings) -> Iterator[FileItem]:
        if asked.unit == "line":
            for number, line, read in lines(path):
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


class JsonLines(Reader):
    """Reader of files with a JSON value per line; `.gz` and `.zst` too."""

    suffixes = (".jsonl", ".ndjson", ".json.lines")

    def items(self, path: Path, asked: ReaderSettings) -> Iterator[FileItem]:  # noqa: ARG002 -- what any of them needs
        decode = msgspec.json.Decoder().decode
        for number, line, read in lines(path):
            yield FileItem(f"line {number}", _value(decode, line), read)


def _value(decode: Any, line: bytes) -> Any:
    try:
        return decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Bad(_half_in(line) or f"no JSON: {error}")


def _half_in(line: bytes) -> str:
    """Return the message if an unpaired surrogate is all that is wrong with a line, else "".

    Python's own JSON decoder accepts such a line.
    """
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return half_of_pair(error)
    except (ValueError, RecursionError):
        pass
    return ""


MEMBERS: Final[Mapping[str, Reader]] = {
    "jsonl": JsonLines(),
    "text": Texts(),
}
