"""Reader of JSON lines: a record, a text, token ids or messages a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from steercap.lab.datasets.collecting.readers import Bad, FileItem, Reader, ReaderSettings, half_of_pair, lines


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


MEMBER = JsonLines()
