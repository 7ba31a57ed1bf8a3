"""Positions of messages and media in a prompt, found by rendering the chat template with marks in the messages.

A chat template is a program: it may drop, move, trim, repeat or merge messages, and branch on their text. So nothing is
inferred from special tokens, nor from the difference of two texts alone. The conversation is rendered again with marks,
rare characters, in one message's content. A rendering counts only if it equals the prompt once the marks are removed or
replaced by the content: then the template took the same branches, and the marks are where the content is. A message
without such a rendering has no span but a reason.

At the positions of media, the model reads embeddings of the media, and token ids are placeholders.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from steercap.core.rows import Ints
from steercap.core.values import shown
from steercap.errors import InvalidPrompt

_T = TypeVar("_T")
_PART: Final = "{'type': 'text', 'text': ...}"
#: Key of the text in a content part, by type of part.
_TEXT_KEYS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
#: Range [start, stop) of characters in the rendered prompt.
Region = tuple[int, int]
#: Generator that yields conversations to render, and is sent each rendered text, or None if the template refuses it.
Renderings = Generator[list[Mapping[str, Any]], str | None, _T]

LEFT_OUT: Final = "is not in the prompt: the chat template leaves it out"
UNCLEAR: Final = (
    "cannot be placed in the prompt: the chat template depends on its content, or changes it; select its rows by "
    "position"
)
UNSPELT: Final = "cannot be placed in the prompt: this tokenizer does not say where; select its rows by position"
#: Maximum number of renderings with marks for one text; two tags that a template branches on need about forty.
PROBES: Final = 64
#: Code points used as marks: Unicode's private use area.
_MARKS: Final = range(0xE000, 0xF900)
_BLANK: Final = " \t\n\r\f\v"


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content: "" for None, the texts of several parts joined by line feeds.

    Raises:
        InvalidPrompt: the content, or a part of it, is no text.
    """
    content: Any = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, (list, tuple)):
        raise InvalidPrompt(f"content={shown(content)} of a message; give text, or a list of parts {_PART}")
    texts = [_text_of_part(part) for part in content]
    if None in texts:
        raise InvalidPrompt(f"{shown(content[texts.index(None)])} in the content of a message is no text; give {_PART}")
    return "\n".join(text for text in texts if text is not None)


def texts_in(message: Mapping[str, Any]) -> str:
    """Return all texts in a message's content, joined by line feeds; other parts, such as images, are ignored."""
    return "\n".join(text for text, _ in _texts(message))


def _text_of_part(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    kind = part.get("type", "text")
    found = part.get(_TEXT_KEYS.get(kind, "")) if isinstance(kind, str) else None
    return found if isinstance(found, str) else None


#: Function that converts a message's content to one form, adding further fields to each part.
_Form: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


def content_form(
    conversation: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Find the form of message content that a chat template reads, a string or a list of parts.

    The conversation is rendered in each form with marks in place of the texts; the form whose rendering has most marks
    wins. Parts get an additional field, which shows in the rendering if the template prints a list of parts as Python;
    that form is rejected.

    Args:
        conversation: messages, each with "role" and "content".
        render: function that renders messages to text, and raises if the template refuses them.

    Returns:
        Function that converts a message to that form.
    """
    field = "content-part"
    while field in str(conversation):
        field += "-"
    count = itertools.count()
    marked = [_marked(message, count) for message in conversation]
    marks = [_mark(number) for number in range(next(count))]
    in_lists = any(isinstance(message.get("content"), (list, tuple)) for message in conversation)
    forms: list[_Form] = [as_given, _in_parts, *([_in_text] if in_lists else [])]
    best: _Form = _in_text if in_lists else as_given
    fewest = len(marks) + 1
    for form in forms:
        try:
            rendered = render([form(message, {field: field}) for message in marked])
        except Exception:  # noqa: BLE001, S112 -- templates raise anything
            continue
        if field in rendered.casefold():
            continue
        left_out = sum(mark not in rendered for mark in marks)
        if left_out < fewest:
            fewest, best = left_out, form
        if not fewest:
            break
    return lambda message: best(message, {})


def _mark(number: int) -> str:
    return f"{chr(_MARKS[0])}{number}{chr(_MARKS[1])}"


def _marked(message: Mapping[str, Any], count: Iterator[int]) -> Mapping[str, Any]:
    """Replace each text in a message's content that is not blank by a mark, numbered by `count`."""
    for at, (words, _) in enumerate(_texts(message)):
        if words.strip():
            message = [*_texts(message)][at][1](_mark(next(count)))
    return message


def as_given(message: Mapping[str, Any], more: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """Keep the form of a message's content: text unchanged, "" for None (a template would print it), lists as parts."""
    if isinstance(message.get("content"), (list, tuple)):
        return _in_parts(message, more)
    return {**message, "content": ""} if message.get("content", "") is None else message


def _in_text(message: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG001 -- it has no part
    return {**message, "content": content_text(message)}


def _in_parts(message: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
    content: Any = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else [content or ""]
    return {**message, "content": [_part(one, more) for one in parts or ([""] if more else [])]}


def _part(part: Any, more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part with further fields; every kind of text becomes type "text"."""
    said = _text_of_part(part)
    if said is None:
        return {**part, **more} if isinstance(part, Mapping) else part
    return {**(part if isinstance(part, Mapping) else {}), "type": "text", "text": said, **more}


def place(
    text: str, conversation: Sequence[Mapping[str, Any]], index: int, spell: Callable[[str], str] = str
) -> Renderings[list[Region] | str]:
    """Find the character regions of a rendered conversation that are one message's content.

    Args:
        text: the rendered conversation.
        conversation: the messages that were rendered.
        index: index of the message to find.
        spell: function that converts content, character by character, to its spelling in `text`.

    Returns:
        As the generator's return value: the regions, [] for empty content, or `LEFT_OUT` or `UNCLEAR`.
    """
    taken = {*text}.union(*(words for message in conversation for words, _ in _texts(message)))
    marks = [mark for mark in map(chr, _MARKS) if mark not in taken]
    found: list[list[Region] | str] = []
    for words, replaced in _texts(conversation[index]):

        def changed(given: str, replaced: Callable[[str], Mapping[str, Any]] = replaced) -> list[Mapping[str, Any]]:
            return [*conversation[:index], replaced(given), *conversation[index + 1 :]]

        found.append((yield from _TextSearch(text, words, changed, spell, marks).regions()))
    if UNCLEAR in found:
        return UNCLEAR
    placed = [one for one in found if isinstance(one, list)]
    if found and not placed:
        return LEFT_OUT
    regions = [region for one in placed for region in one]
    between = [text[left[1] : right[0]] for left, right in itertools.pairwise(regions)]
    ordered = all(left[1] <= right[0] for left, right in itertools.pairwise(regions))
    if len(regions) > 1 and max(map(len, placed)) == 1 and ordered and not "".join(between).strip(_BLANK):
        return [(regions[0][0], regions[-1][1])]
    return regions


def _texts(message: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[str], Mapping[str, Any]]]]:
    """Yield each text in a message's content, with a function that returns the message with another text there."""
    content: Any = message.get("content")
    if isinstance(content, str):
        yield content, lambda given: {**message, "content": given}
    elif isinstance(content, (list, tuple)):
        for at, part in enumerate(content):
            words = part.get(_key(part)) if isinstance(part, Mapping) else part
            if isinstance(words, str):
                yield words, partial(_with_part, message, content, at)


def _with_part(message: Mapping[str, Any], content: Sequence[Any], at: int, text: str) -> Mapping[str, Any]:
    part = {**content[at], _key(content[at]): text} if isinstance(content[at], Mapping) else text
    return {**message, "content": [*content[:at], part, *content[at + 1 :]]}


def _key(part: Mapping[str, Any]) -> str:
    return _TEXT_KEYS.get(str(part.get("type", "text")), "text")


class _TextSearch:
    """Search for one text, `words`, of a message in the rendered prompt `text`.

    Args:
        text, words, spell: the rendered prompt, the text to find, and the spelling as for `place`.
        changed: function that returns the conversation with another text in place of `words`.
        marks: characters that occur nowhere in the prompt or the messages.
    """

    def __init__(
        self,
        text: str,
        words: str,
        changed: Callable[[str], list[Mapping[str, Any]]],
        spell: Callable[[str], str],
        marks: Sequence[str],
    ) -> None:
        self.text = text
        self.words = words
        self.changed = changed
        self.spell = spell
        self.marks = marks

    def regions(self) -> Renderings[list[Region] | str]:
        """Find the text's regions by replacing it; where that changes more of the rendering, by marks inside it."""
        if not self.words:
            return []
        if (rendered := (yield self.changed(self.marks[0]))) == self.text:
            return LEFT_OUT
        pieces = [] if rendered is None else rendered.split(self.spell(self.marks[0]))
        if len(pieces) > 1:
            for words in _trimmed(self.words):
                if self.spell(words).join(pieces) == self.text:
                    return _gaps(pieces, len(self.spell(words)))
        if len(pieces) == 2:
            kept = yield from self._cut(pieces[0], pieces[1])
            if kept is not None:
                return [kept]
        return (yield from self._marked())

    def _cut(self, head: str, tail: str) -> Renderings[Region | None]:
        """Find the region if the template writes only the end or beginning of the text, between `head` and `tail`."""
        start, stop = len(head), len(self.text) - len(tail)
        if start >= stop or not (self.text.startswith(head) and self.text.endswith(tail)):
            return None
        rest, ends = self.text[start:stop], [0, *itertools.accumulate(len(self.spell(one)) for one in self.words)]
        for first, last in ((ends[-1] - len(rest), ends[-1]), (0, len(rest))):
            if first not in ends or last not in ends or self.spell(self.words)[first:last] != rest:
                continue
            at, end = ends.index(first), ends.index(last)
            inner = self.words[at + 1 : end - 1]
            marked = self.marks[0] + (inner + self.marks[1] if end - at > 1 else "")
            rendered = yield self.changed(self.words[:at] + marked + self.words[end:])
            if rendered == head + self.spell(marked) + tail:
                return start, stop
        return None

    def _marked(self) -> Renderings[list[Region] | str]:
        """Find the regions by marks between characters, except where a mark makes the template take another branch."""
        for words in _trimmed(self.words)[1:]:
            if (yield self.changed(words)) == self.text:
                self.words = words
                break
        if not self.words:
            return []
        seen = yield from self._probe()
        places = sorted((at, place) for place, found in seen.items() for at in found)
        if not places:
            return LEFT_OUT if len(seen) == len(_places(self.words)) else UNCLEAR
        runs: list[list[tuple[int, int]]] = []
        for at, place in places:
            if not runs or place <= runs[-1][-1][1]:
                runs.append([])
            runs[-1].append((at, place))
        starts = yield from self._edges([run[0] for run in runs], backwards=False)
        stops = yield from self._edges([run[-1] for run in runs], backwards=True)
        if starts is None or stops is None:
            return UNCLEAR
        dropped = {place for place, found in seen.items() if not found}
        regions = list[Region]()
        for run, start, stop in zip(runs, starts, stops, strict=True):
            parts = yield from self._parts(run, (start, stop), dropped)
            if parts is None:
                return UNCLEAR
            regions += parts
        return regions

    def _probe(self) -> Renderings[dict[int, list[int]]]:
        """Return the offsets in the prompt at which a mark put before a character appears, by character index.

        If a set of marks changes the rest of the rendering, each half of it is tried again.
        """
        pending, seen = [_places(self.words)], dict[int, list[int]]()
        for _ in range(PROBES):
            if not pending:
                break
            places = pending.pop()
            marks = dict(zip(places, self.marks, strict=False))
            rendered = yield self.changed(
                "".join(marks.get(at, "") + self.words[at : at + 1] for at in range(len(self.words) + 1))
            )
            found = None if rendered is None else self._read(rendered, marks)
            if found is not None:
                seen |= found
            elif len(places) > 1:
                pending += [places[: len(places) // 2], places[len(places) // 2 :]]
        return seen

    def _read(self, rendered: str, marks: Mapping[int, str]) -> dict[int, list[int]] | None:
        """Return the offsets of each mark in the prompt; None if the rendering without marks is not the prompt."""
        places = {self.spell(mark): place for place, mark in marks.items()}
        found: dict[int, list[int]] = {place: [] for place in marks}
        read, before = "", 0
        for match in re.finditer("|".join(map(re.escape, places)), rendered):
            read += rendered[before : match.start()]
            found[places[match[0]]].append(len(read))
            before = match.end()
        return found if read + rendered[before:] == self.text else None

    def _edges(self, marks: Sequence[tuple[int, int]], *, backwards: bool) -> Renderings[list[int] | None]:
        """Find the start (with `backwards`, the end) of each occurrence of the text, from its outermost marks.

        Beyond the outermost mark are characters, such as tags, among which a mark would change the rendering. If the
        prompt has them there, they belong to the message; if not, the text is rendered without them to find the edge.

        Args:
            marks: outermost mark of each occurrence: offset in the prompt, and character index in the text.
            backwards: True to find ends.

        Returns:
            Character offsets in the prompt; None if they are ambiguous.
        """
        place = marks[0][1]
        turn: Callable[[str], str] = (lambda one: one[::-1]) if backwards else str
        beyond = self.words[place:] if backwards else self.words[:place]
        spelled, text = turn(self.spell(beyond)), turn(self.text)
        places = sorted(len(text) - at if backwards else at for at, _ in marks)
        if beyond.strip(_BLANK) and (len(marks) == 1 or spelled[0] not in _BLANK):
            found = [_start_of(text, at, spelled) for at in places]
            if None not in found:
                places = [at for at in found if at is not None]
                beyond = ""
        if beyond:
            if len({place for _, place in marks}) > 1:
                return None
            mark = self.marks[0]
            rendered = yield self.changed(self.words[:place] + mark if backwards else mark + self.words[place:])
            pieces = [] if rendered is None else turn(rendered).split(turn(self.spell(mark)))
            shifted = _shifted(text, places, pieces, spelled)
            if shifted is None:
                return None
            places = shifted
        return [len(text) - at for at in reversed(places)] if backwards else places

    def _parts(
        self, run: Sequence[tuple[int, int]], region: Region, dropped: set[int]
    ) -> Renderings[list[Region] | None]:
        """Return the regions of one occurrence, several if the template leaves out text between; None if ambiguous."""
        regions, begin = [], region[0]
        for (at, place), (then, after) in itertools.pairwise(run):
            here, said = self.text[at:then], self.spell(self.words[place:after])
            if _dense(here) == _dense(said) or not any(place < one < after for one in dropped):
                continue
            if (yield self.changed(self.words[:place] + self.words[after:])) != self.text:
                return None
            if _dense(here):
                regions.append((begin, at))
                begin = then
        return [*regions, (begin, region[1])]


def _shifted(text: str, places: Sequence[int], pieces: Sequence[str], beyond: str) -> list[int] | None:
    """Find the starts of a text's occurrences from a rendering without the characters beyond the mark.

    Args:
        text: the prompt.
        places: offset of the mark in each occurrence.
        pieces: the rendering, split at the mark.
        beyond: spelled characters that each occurrence may have before the mark.

    Returns:
        Character offsets in the prompt; None if they are ambiguous.
    """
    found, before = [], 0
    for place, piece in zip([*places, len(text)], pieces, strict=False):
        begin = before + len(piece)
        if text[before:begin] != piece or text[begin:place] not in ("", beyond):
            return None
        found.append(begin)
        before = place
    return found[:-1] if len(pieces) == len(places) + 1 and found[-1] == len(text) else None


def _trimmed(words: str) -> list[str]:
    """Return a text, and the text in each form to which templates trim it, without duplicates."""
    cuts = (cut(words, blank) for blank in (None, "\n") for cut in (str.strip, str.lstrip, str.rstrip))
    return list(dict.fromkeys((words, *cuts)))


def _gaps(pieces: Sequence[str], length: int) -> list[Region]:
    """Return the regions between consecutive pieces of a text, each `length` characters long."""
    starts = list(itertools.accumulate(len(piece) + length for piece in pieces[:-1]))
    return [(stop - length, stop) for stop in starts]


def _places(words: str) -> list[int]:
    """Return indices for marks in a text: ends, middle, and beside each character that is no letter or digit."""
    inner = [at for at in range(1, len(words)) if not (words[at - 1].isalnum() and words[at].isalnum())]
    half = len(_MARKS) // 4
    return sorted({0, len(words) // 2, len(words), *inner[:half], *inner[-half:]})


def _start_of(text: str, stop: int, words: str) -> int | None:
    """Return the offset where `words` begins in `text` if it ends at `stop`, ignoring blanks; None if it does not."""
    for one in reversed(words.lstrip(_BLANK)):
        if one in _BLANK:
            continue
        while stop and text[stop - 1] in _BLANK:
            stop -= 1
        if not stop or text[stop - 1] != one:
            return None
        stop -= 1
    blank = words[: len(words) - len(words.lstrip(_BLANK))]
    return stop - len(blank) if text[:stop].endswith(blank) else stop


def _dense(text: str) -> str:
    return text.translate(dict.fromkeys(map(ord, _BLANK)))


#: Token type of an ordinary token, whose embedding is looked up by its id.
TEXT: Final = "text"


@dataclass(frozen=True)
class MediaSpan:
    """Positions [start, stop) of a prompt whose embeddings come from one image, sound or video.

    An image that is cut into tiles can have several spans; tokens between them, such as line ends, are text.

    Args:
        kind: kind of media: "image", "audio" or "video".
        index: index among the media of its kind in the prompt, from 0.
        start: first position.
        stop: position after the last.
        digest: vLLM's hash of the content, equal for equal content in the same model.
    """

    kind: str
    index: int
    start: int
    stop: int
    digest: str


def types_at(spans: Sequence[MediaSpan], positions: Ints) -> npt.NDArray[np.str_]:
    """Return the token type of each row, "text" or the kind of its media span: str [rows].

    Args:
        spans: media spans of the prompt.
        positions: positions of the rows, int64 [rows].
    """
    kinds = [TEXT, *(span.kind for span in spans)]
    types: npt.NDArray[Any] = np.full(len(positions), TEXT, dtype=np.array(kinds).dtype)
    for span in spans:
        types[(positions >= span.start) & (positions < span.stop)] = span.kind
    return types


@dataclass(frozen=True)
class MessageSpan:
    """Positions [start, stop) of one message's content in a prompt, without the template's tokens around it.

    A message that the template writes several times has several spans.

    Args:
        role: the message's role; "generation_prompt" for the tokens after the last message, and "assistant" with
            `index` None for the reply.
        index: index of the message in the conversation; None for the generation prompt and the reply.
        start: first position.
        stop: position after the last; equal to `start` if the message has no token.
        missing: reason why a message has no span (the template leaves it out, or its place is unclear), or "".
    """

    role: str
    index: int | None
    start: int
    stop: int
    missing: str = ""


def message_spans(
    conversation: Sequence[Mapping[str, Any]],
    placed: Sequence[list[Region] | str],
    offsets: Sequence[tuple[int, int]],
) -> list[MessageSpan]:
    """Return the spans of all messages, by message; overlapping regions of two messages count as unclear.

    Args:
        conversation: messages with their roles.
        placed: result of `place` for each message: regions, or a reason.
        offsets: character range [start, stop) of each token of the prompt.
    """
    every = [(region, index) for index, one in enumerate(placed) if isinstance(one, list) for region in one]
    every = sorted(one for one in every if one[0][0] < one[0][1])
    shared = {
        index
        for left, right in itertools.pairwise(every)
        if left[1] != right[1] and right[0][0] < left[0][1]
        for index in (left[1], right[1])
    }
    spans: list[MessageSpan] = []
    for index, (message, one) in enumerate(zip(conversation, placed, strict=True)):
        role = str(message.get("role"))
        if isinstance(one, str) or index in shared:
            spans.append(MessageSpan(role, index, 0, 0, one if isinstance(one, str) else UNCLEAR))
        else:
            spans += [MessageSpan(role, index, *token_span(offsets, region)) for region in one or [(0, 0)]]
    return spans


def token_span(offsets: Sequence[tuple[int, int]], region: Region) -> tuple[int, int]:
    """Return the tokens [start, stop) that contain a character of a region; (0, 0) if there are none.

    Args:
        offsets: character range [start, stop) of each token.
        region: characters [start, stop).
    """
    first, end = region
    inside = [number for number, (start, stop) in enumerate(offsets) if max(start, first) < min(stop, end)]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
