"""Spans of chat messages against texts written piece by piece, over templates that decide by what messages say."""

from __future__ import annotations

import contextlib
import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.client.chats import templated as served
from steercap.core.chat import LEFT_OUT, UNCLEAR, UNSPELT, content_text, token_span
from steercap.core.names import variables_of
from steercap.core.prompts import template_arguments, templated, tokens_of
from steercap.core.receipt import Receipt
from steercap.core.spec import Point
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec

#: Each template with its oracle: pieces (index of the message or None, text), written from the template by hand.
TEMPLATES: dict[str, tuple[str, object]] = {}


def template(source: str):
    """Register a template's oracle."""

    def known(write):
        TEMPLATES[write.__name__] = (source, write)
        return write

    return known


@template(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
def chatml(talk):
    for i, m in enumerate(talk):
        yield from ((None, f"<|im_start|>{m['role']}\n"), (i, m["content"]), (None, "<|im_end|>\n"))
    yield None, "<|im_start|>assistant\n"


@template(
    "<bos>[system]\nCut off: {{ strftime_now('%%') }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}<eot>"
    "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<eot>{% endfor %}"
)
def llama3(talk):
    yield None, "<bos>[system]\nCut off: %\n\n"  # no date: it may change between the template and this
    if talk[0]["role"] == "system":
        yield 0, talk[0]["content"].strip()
    yield None, "<eot>"
    for i, m in enumerate(talk):
        if i or m["role"] != "system":
            yield from ((None, f"[{m['role']}]\n\n"), (i, m["content"].strip()), (None, "<eot>"))


@template(
    "<bos>{% set first = '' %}{% set loop_messages = messages %}"
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% endif %}"
    "{% for m in loop_messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<end>\n{% endfor %}{{ '<start>model\n' }}"
)
def gemma(talk):
    yield None, "<bos>"
    system = talk[0]["role"] == "system"
    for i, m in enumerate(talk[system:], int(system)):
        yield None, f"<start>{'model' if m['role'] == 'assistant' else m['role']}\n"
        if system and i == 1:
            yield from ((0, talk[0]["content"]), (None, "\n\n"))
        yield from ((i, m["content"].strip()), (None, "<end>\n"))
    yield None, "<start>model\n"


@template(
    "<s>{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% elif m.role == 'user' %}[INST] {% if loop.last and ns.system %}{{ ns.system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
def mistral(talk):
    yield None, "<s>"
    system = [i for i, m in enumerate(talk) if m["role"] == "system"]
    for i, m in enumerate(talk):
        if m["role"] == "user":
            yield None, "[INST] "
            if i == len(talk) - 1 and system and talk[system[-1]]["content"]:
                yield from ((system[-1], talk[system[-1]]["content"]), (None, "\n\n"))
            yield from ((i, m["content"]), (None, "[/INST]"))
        elif m["role"] == "assistant":
            yield from ((None, " "), (i, m["content"].strip()), (None, "</s>"))


QUERY = (
    "{% set ns = namespace(last=messages | length - 1, open=true) %}{% for m in messages[::-1] %}"
    "{% set i = messages | length - 1 - loop.index0 %}"
    "{% if ns.open and m.role == 'user' and not (m.content.startswith('<tool_response>')"
    " and m.content.endswith('</tool_response>')) %}{% set ns.open = false %}{% set ns.last = i %}{% endif %}{% endfor %}"
)


def last_query(talk):
    for i in reversed(range(len(talk))):
        said = talk[i]["content"]
        if talk[i]["role"] == "user" and not (said[:15] == "<tool_response>" and said[-16:] == "</tool_response>"):
            return i
    return len(talk) - 1


@template(
    QUERY + "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}{% set content = m.content %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
def qwen3(talk):
    last = last_query(talk)
    for i, m in enumerate(talk):
        said = m["content"]
        yield None, f"<|im_start|>{m['role']}\n"
        if m["role"] == "assistant":
            thought, closes = "", "</think>" in said
            if closes:
                thought = said.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                said = said.split("</think>")[-1].lstrip("\n")
            if i > last and (thought or i == len(talk) - 1):
                own = i if thought else None
                opened = own if "<think>" in m["content"] else None
                inner = thought.strip("\n")
                yield opened, "<think>"
                yield (own if opened is not None or not inner else None), "\n"
                yield from ((own, inner), (own, "\n</think>\n\n"))
                said = said.lstrip("\n")
        yield from ((i, said), (None, "<|im_end|>\n"))
    yield None, "<|im_start|>assistant\n"


@template(
    QUERY + "{% for m in messages %}{% if m.role == 'assistant' %}[A]{% if loop.index0 > ns.last %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}[/A]{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
def thinker(talk):
    last = last_query(talk)
    for i, m in enumerate(talk):
        if m["role"] == "assistant":
            yield None, "[A]"
            yield i, m["content"] if i > last else m["content"].rpartition("</think>")[2]
            yield None, "[/A]"
        else:
            yield from ((None, f"[{m['role']}]"), (i, m["content"]))


@template(
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|User|>{{ m.content }}{% elif m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>{{ content }}<eos>{% endif %}{% endfor %}{{ '<|Assistant|><think>\n' }}"
)
def deepseek(talk):
    yield from ((i, m["content"]) for i, m in enumerate(talk) if m["role"] == "system")
    for i, m in enumerate(talk):
        if m["role"] == "user":
            yield from ((None, "<|User|>"), (i, m["content"]))
        elif m["role"] == "assistant":
            yield from ((None, "<|Assistant|>"), (i, m["content"].split("</think>")[-1]), (None, "<eos>"))
    yield None, "<|Assistant|><think>\n"


@template("{% for m in messages[-3:-1] if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}Go:")
def leaves_out(talk):
    for i, m in list(enumerate(talk))[-3:-1]:
        if m["role"] != "system":
            yield from ((None, f"{m['role']}: "), (i, m["content"]), (None, "\n"))
    yield None, "Go:"


@template("{% for m in messages %}Q: {{ m.content }} Again: {{ m.content | trim }}.\n{% endfor %}")
def repeats(talk):
    for i, m in enumerate(talk):
        yield from ((None, "Q: "), (i, m["content"]), (None, " Again: "), (i, m["content"].strip()), (None, ".\n"))


@template(
    "{% set ns = namespace(role='') %}{% for m in messages %}{% if m.role == ns.role %}{{ '\n' }}{% else %}[{{ m.role }}]{% endif %}"
    "{{ m.content }}{% set ns.role = m.role %}{% endfor %}"
)
def merges(talk):
    for i, m in enumerate(talk):
        yield None, "\n" if i and talk[i - 1]["role"] == m["role"] else f"[{m['role']}]"
        yield i, m["content"]


@template(
    "{% for m in messages %}{% if not loop.first and m.content == loop.previtem.content %}{% else %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
def drops_repeats(talk):
    for i, m in enumerate(talk):
        if not i or m["content"] != talk[i - 1]["content"]:
            yield from ((None, f"[{m['role']}]"), (i, m["content"]))


@template("{% for m in messages if 'secret' not in m.content %}[{{ m.role }}]{{ m.content | upper }}{% endfor %}")
def censors(talk):
    for i, m in enumerate(talk):
        if "secret" not in m["content"]:
            yield from ((None, f"[{m['role']}]"), (i, m["content"].upper()))


@template("{% for m in messages %}{{ m.role }}={{ m.content[:9] }};{% endfor %}")
def shortens(talk):
    for i, m in enumerate(talk):
        yield from ((None, f"{m['role']}="), (i, m["content"][:9]), (None, ";"))


#: Share of messages that may be unclear where a template decides by equality or by words of a content, of which no
#: rendering keeps the decision, or drops tags from the middle of one; each such message must say so.
MAY_BE_UNCLEAR = {"drops_repeats": 0.5, "censors": 0.1, "qwen3": 0.05}
WORDS = [
    "Why? Why?",
    "Why?",
    "W",
    "user",
    "\nHello",
    " two words \n",
    "",
    "  ",
    "\n\n",
    "<|im_end|>\n<|im_start|>assistant\nI am the other",
    "[/A][user]",
    "<tool_response>42</tool_response>",
    '<tool_response>\n{"a": [1, 2]}\n</tool_response>',
    "<tool_response></tool_response>",
    "<think>look it up</think>Let me see.",
    "<think>\nsteps\n</think>\n\nDone.",
    "<think>\n\n</think>\n\nDone.",
    "no opening</think>Done",
    "<think>first</think><think>second</think>!!",
    "[INST] é 日本語 [/INST]",
    "the secret: Why?",
    "{{ messages }} \\n 'x' \"y\"",
    "\ue000\ue001",
    "a long text of many words, " * 9,
]

#: Contents are also made of these, in any order.
PIECES = [
    "<think>",
    "</think>",
    "\n",
    " ",
    "<tool_response>",
    "</tool_response>",
    "x",
    "Why",
    "[A]",
    "<",
    "[INST] ",
    "é",
]


class Characters:
    """A tokenizer that reads each character as a token, with the templates of transformers."""

    def __init__(self, source: str) -> None:
        self.source = source

    def apply_chat_template(self, conversation, *, tokenize, **given):
        return real().apply_chat_template(conversation, tokenize=tokenize, chat_template=self.source, **given)

    def encode(self, text, **_):
        return [*map(ord, text)]

    def __call__(self, text, **_):
        return {"input_ids": [*map(ord, text)], "offset_mapping": [(at, at + 1) for at in range(len(text))]}


@functools.cache
def real():
    """A tokenizer of transformers, for its templates."""
    from transformers import AutoTokenizer

    from steercap.testing import tiny_checkpoint

    return AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))


def talk_of(draw: random.Random) -> list[dict[str, str]]:
    """A conversation of one to six messages, a system message first or none; roles may follow themselves."""
    roles = ["system"] * draw.randrange(2) + draw.choices(["user", "assistant"], k=draw.randrange(1, 6))
    made = ["".join(draw.choices(PIECES, k=draw.randrange(7))) for _ in range(6)]
    words = draw.choice([draw.choices(WORDS, k=3), WORDS, made])
    return [{"role": role, "content": draw.choice(words)} for role in roles]


def check(name: str, talk) -> int:
    """Compare with the pieces; returns how many messages were said to be unclear."""
    source, write = TEMPLATES[name]
    pieces = list(write(talk))
    ids, spans = templated(Characters(source), talk, {}, spans=True)
    text = "".join(map(chr, ids))
    assert text == "".join(piece for _, piece in pieces), "the oracle is wrong"
    owners = [owner for owner, piece in pieces for _ in piece]
    unclear = 0
    for i in range(len(talk)):
        mine = [span for span in spans if span.index == i]
        assert mine, f"message {i} is not spoken of"
        assert {span.role for span in mine} == {talk[i]["role"]}
        if mine[0].missing == UNCLEAR:
            unclear += 1
            continue
        found = {at for span in mine for at in range(span.start, span.stop)}
        right = {at for at, owner in enumerate(owners) if owner == i}
        assert found == right, (i, talk, text, "".join(text[at] for at in sorted(found)))
        assert (mine[0].missing == LEFT_OUT) <= (not right)
        written = any(owner == i for owner, _ in pieces)
        assert mine[0].missing == LEFT_OUT or written or not talk[i]["content"].strip(), (i, talk)
    return unclear


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_has_its_own_words_or_says_that_it_has_none(name) -> None:
    """Spans are those of the pieces; only where a template decides by a content may a message be unclear."""
    draw, unclear, asked = random.Random(name), 0, 0
    for _ in range(60):
        talk = talk_of(draw)
        unclear += check(name, talk)
        asked += len(talk)
    assert unclear <= MAY_BE_UNCLEAR.get(name, 0) * asked, f"{unclear} of {asked}"


def test_a_repeated_or_missing_message_is_asked_for_by_its_index() -> None:
    """Both writings are its rows; a message that is not in the prompt, or is unclear there, is an error by name."""
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]
    found = handle_of("repeats", talk)
    assert words(found, 0) == "Why?Why?"
    assert words(found, -1) == "No.No."
    found = handle_of("leaves_out", talk)
    assert words(found, 0) == words(found, -2) == words(found, "user") == "Why?"
    for missing in (1, -1, "assistant"):
        with pytest.raises(InvalidSpec, match=r"message 1 \(assistant\) is not in the prompt"):
            found.rows_of(missing)
    with pytest.raises(InvalidSpec, match=r"no message 7; messages: 0: user, 1: assistant$"):
        handle_of("repeats", talk).rows_of(7)
    same = [{"role": "user", "content": "Why?"}] * 2
    with pytest.raises(InvalidSpec, match=r"message 0 \(user\) cannot be placed"):
        handle_of("drops_repeats", same).rows_of("user")


def test_thinking_is_nobody_elses_where_a_tool_answers() -> None:
    """A tool's answer is no query: thinking of the turn before it stays, and belongs to that turn."""
    talk = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "<think>look it up</think>Let me see."},
        {"role": "user", "content": "<tool_response>42</tool_response>"},
    ]
    found = handle_of("thinker", talk)
    assert [words(found, index) for index in range(3)] == [message["content"] for message in talk]


def test_parts_of_a_content_are_one_message() -> None:
    """Texts of a list count together; the template writes them one behind the other."""
    source = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text | trim }}\n{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": text} for text in ("Why? ", "", "Why?")]
    talk = [{"role": "user", "content": parts}, {"role": "user", "content": parts[:1]}]
    _, spans = templated(Characters(source), talk, {}, spans=True)
    assert [(span.index, span.start, span.stop) for span in spans] == [(0, 6, 16), (1, 23, 27)]


TEXTS_ALONE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ADDS_TEXTS = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim | upper }}{% endfor %}"
PARTS_ALONE = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}|{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}|{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (TEXTS_ALONE, "[system]Be brief.[user]Why\ndo so?[tool][assistant]No."),
        (ADDS_TEXTS, "[system]BE BRIEF.[user]WHY\nDO SO?[tool][assistant]NO."),
        (PARTS_ALONE, "[system]Be brief.|[user]Why|do so?|[tool]|[assistant]No.|"),
        (EITHER, "[system]Be brief.[user]Why|do so?|[tool][assistant]No.|"),
    ],
)
def test_contents_are_given_as_the_template_reads_them(source, written) -> None:
    """Parts where it reads parts, else their texts, as vLLM's server does: no list as Python writes it, no None."""
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why"}, "do so?"]},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    ids, spans = templated(Characters(source), talk, {}, spans=True)
    text = "".join(map(chr, ids))
    assert text == written
    mine = [[text[span.start : span.stop].lower() for span in spans if span.index == index] for index in range(2)]
    assert "".join(mine[0]) == "be brief."
    assert "".join(mine[1]).replace("\n", "").replace("|", "") == "whydo so?"


def test_texts_are_parts_where_a_template_reads_nothing_else() -> None:
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ""}]
    ids, _ = templated(Characters(PARTS_ALONE), talk, {}, spans=False)
    assert "".join(map(chr, ids)) == "[user]Why?|[assistant]|"


ELSE_NOTHING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim if m.content is string else '' }}{% endfor %}[assistant]"
)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "refusal", "refusal": " I will not. "},
        {"type": "thinking", "thinking": "I will not."},
        {"type": "text", "text": "assistant"},
    ],
)
def test_no_text_is_lost_where_a_template_reads_texts_alone(part) -> None:
    """Neither one of another kind than "text", nor one that the template says of its own accord."""
    said = part[part["type"]].strip()
    talk = [{"role": "user", "content": "Do so."}, {"role": "assistant", "content": [part]}]
    ids, spans = templated(Characters(ELSE_NOTHING), talk, {}, spans=True)
    text = "".join(map(chr, ids))
    assert text == f"[user]Do so.[assistant]{said}[assistant]"
    (mine,) = (span for span in spans if span.index == 1)
    assert (text[mine.start : mine.stop], mine.start) == (said, len("[user]Do so.[assistant]"))


@pytest.mark.parametrize(
    "message",
    [{"content": {"text": "hi"}}, {"content": 5}, {"content": b"hi"}, {"contents": "hi"}, {"value": "hi"}, {}],
)
async def test_a_message_without_a_text_is_refused(message) -> None:
    """A template writes what Python shows of it, or nothing, without an error; of a server too, which is not asked."""
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ (m['content'] | trim) ~ (m.said or '') }}{% endfor %}"
    talk = [{"role": "user", "content": "hi"}, {"role": "user", **message}]
    for spans in (True, False):
        with pytest.raises(InvalidPrompt, match=r"message 1 has .*give"):
            templated(Characters(source), talk, {"chat_template": source}, spans=spans)
        with pytest.raises(InvalidPrompt, match=r"message 1 has .*give"):
            await served(Server(source), talk, {}, spans=spans)


@pytest.mark.parametrize("key", ["text", "message", "messages", "set", "type", "last", "id"])
def test_a_word_of_a_template_is_no_key_of_a_message(key) -> None:
    """Nor is a key of parts or tools: only what is read where "role" is."""
    source = (
        "{% set ns = namespace(last=messages[0]) %}{% for message in messages %}{{ '<' ~ message['role'] ~ '>' }}"
        "{% for item in message['content'] or [] %}{% if item['type'] == 'text' %}{{ item.text }}{% endif %}{% endfor %}"
        "{{ message.tools[0].id if message.tools else '' }}{{ message.get('said') or '' }}{% set ns.last = message %}"
        "{% endfor %}{{ ns.last.role ~ ns.last.extra }}"
    )
    for known in ("said", "extra", "tools"):
        templated(real(), [{"role": "user", known: []}], {"chat_template": source}, spans=False)
    with pytest.raises(InvalidPrompt, match=r"message 0 has 'role', .*, and no 'content'"):
        templated(real(), [{"role": "user", key: "hi"}], {"chat_template": source}, spans=False)


@pytest.mark.parametrize("message", [{"content": None}, {"content": []}, {"said": "hi"}, {"tool_calls": []}])
def test_a_message_may_have_what_its_template_reads_in_place_of_a_text(message) -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ (m.said or '') }}{% endfor %}"
    fake = Characters(source)
    fake.chat_template = source
    ids, _ = templated(fake, [{"role": "user", **message}], {}, spans=False)
    assert "".join(map(chr, ids)) == f"<user>{message.get('said', '')}"


def test_an_argument_that_the_template_does_not_read_is_refused() -> None:
    """Such as a misspelt one, which transformers drops; those that the template reads in any branch are taken."""
    source = (
        "{%- if not thinking is defined %}{% set thinking = false %}{% endif %}{% for m in messages %}"
        "{% generation %}{{ m.content ~ (style if thinking else '') }}{% endgeneration %}{% endfor %}"
    )
    talk = [{"role": "user", "content": "hi"}]

    def text_of(**kwargs) -> str:
        ids, _ = templated(real(), talk, {"chat_template": source, **kwargs}, spans=False)
        return real().decode(ids)

    assert text_of() == text_of(thinking=False, style="!", tools=None, documents=[]) == "hi"
    assert text_of(thinking=True, style="!") == "hi!"
    with pytest.raises(
        InvalidRequest, match=r"'thinkng', which the chat template does not read; did you mean 'thinking'"
    ):
        text_of(thinkng=True)
    for name in ("tools", "documents"):
        with pytest.raises(InvalidRequest, match=f"{name!r}, which the chat template does not read"):
            text_of(**{name: [{"title": "a"}]})
    for name in ("tokenize", "return_dict", "truncation", "add_special_tokens"):
        with pytest.raises(InvalidRequest, match=f"{name!r}, which is no variable of a template"):
            template_arguments({name: True})


async def test_an_argument_that_a_servers_template_does_not_read_is_refused() -> None:
    """As far as the server says what it reads; vLLM's server drops others without a word."""
    source, talk = "{% for m in messages %}{{ m.content }}{% endfor %}", [{"role": "user", "content": "hi"}]
    read = variables_of(real(), {"chat_template": "{{ style if thinking is defined }}{{ messages }}"})
    assert read is not None
    assert read - variables_of(real(), {"chat_template": "x"}) == {"style", "thinking"}
    defaults = variables_of(
        real(), {"chat_template": "{% set style = style if style is defined else 'x' %}\n{{ style }}"}
    )
    assert defaults is not None
    assert "style" in defaults  # as where a server's flags give it
    told = Server(source, variables=" ".join(read))
    ids, _ = await served(Server(source), talk, {"thinkng": True}, spans=False)
    assert ids == (await served(told, talk, {"thinking": True, "style": "", "tools": None}, spans=False))[0]
    with pytest.raises(InvalidRequest, match="'thinkng', which the chat template does not read; did you mean 'think"):
        await served(told, talk, {"thinkng": True}, spans=False)
    assert (await served(told, talk, {"thinkng": True, "chat_template": source}, spans=False))[0] == ids
    for own in (None, Characters(source), real()):  # of another library, or without a template
        assert variables_of(own or Characters(source), {}) is None


def test_a_text_in_a_templates_own_words_is_given_in_parts_too() -> None:
    ids, _ = templated(Characters(PARTS_ALONE), [{"role": "user", "content": "user"}], {}, spans=False)
    assert "".join(map(chr, ids)) == "[user]user|"


def test_a_part_that_is_no_text_is_refused_where_texts_are_read() -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_reference", "name": "b"}]}]
    with pytest.raises(InvalidPrompt, match=r"tool_reference.* is no text; give \{'type': 'text', 'text': \.\.\.\}"):
        templated(Characters(TEXTS_ALONE), talk, {}, spans=False)
    for wrong in (3, {"text": "a"}):
        with pytest.raises(InvalidPrompt, match=r"content=.* of a message; give text, or a list of parts"):
            content_text({"role": "user", "content": wrong})


def handle_of(name: str, talk) -> CaptureHandle:
    """A handle with a row for each character of a prompt."""
    ids, spans = templated(Characters(TEMPLATES[name][0]), talk, {}, spans=True)
    point = Point(0, "resid_post")
    captures = Captures({point: torch.ones(len(ids), 1)}, 1)
    receipt = Receipt((point,), np.arange(len(ids)), np.array(ids), len(ids), None)
    return CaptureHandle(
        request_id="r",
        model="m",
        text="",
        prompt_token_ids=ids,
        output_token_ids=[],
        points=(point,),
        num_layers=1,
        lifecycle=Lifecycle("r", found=Found(captures, receipt)),
        messages=spans,
    )


def words(handle: CaptureHandle, message: int | str) -> str:
    """Characters of a message's rows."""
    return "".join(map(chr, handle.token_ids[handle.rows_of(message)].tolist()))


class Server:
    """A server's `/tokenize`, by a tokenizer of transformers."""

    def __init__(self, source: str, **tokenizer: str) -> None:
        self.source = source
        self.name = "m"
        self.tokenizer = tokenizer

    def here(self):
        return self

    def answering(self):
        return contextlib.nullcontext()

    async def ask(self, _method, _path, *, json):
        text = json.get("prompt")
        if text is None:
            text = Characters(self.source).apply_chat_template(
                json["messages"], tokenize=False, add_generation_prompt=json.get("add_generation_prompt", True)
            )
        ids = real().encode(text, add_special_tokens=False)
        return {"tokens": ids, "token_strs": real().convert_ids_to_tokens(ids)}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_server_gives_the_same_spans(name) -> None:
    """What a client finds through tokens of a server's is what the tokenizer itself gives, in any script."""
    source, _ = TEMPLATES[name]
    draw = random.Random(f"served {name}")
    for _ in range(3):
        talk = talk_of(draw)
        ids, spans = templated(real(), talk, {"chat_template": source}, spans=True)
        assert await served(Server(source), talk, {}, spans=True) == (ids, tuple(spans))


@pytest.mark.parametrize(
    ("file", "control"),
    [("tekken_240911.json", [1, 3, None, 4]), ("mistral_instruct_tokenizer_241114.model.v7", [1, 3, None, 4])],
)
def test_a_control_token_that_no_text_spells_is_read(file, control, tmp_path) -> None:
    """Mistral's tokenizers: the ids are those of `apply_chat_template`, however much of the chat is text."""
    import mistral_common
    from vllm.tokenizers.mistral import MistralTokenizer

    source = Path(mistral_common.__file__).parent / "data" / file
    (tmp_path / ("tekken.json" if source.suffix == ".json" else "tokenizer.model.v7")).symlink_to(source)
    tokenizer = MistralTokenizer.from_pretrained(tmp_path)
    (word,) = tokenizer.encode("Hello", add_special_tokens=False)
    talk = [{"role": "user", "content": "Hello"}]
    assert tokens_of(tokenizer, talk, special=True) == [word if one is None else one for one in control]
    for special in (None, False, True):
        ids, spans = templated(tokenizer, talk, {}, spans=True, special=special)
        assert ids == tokens_of(tokenizer, talk, special=True)
        assert [(span.index, span.missing) for span in spans] == [(0, UNSPELT)]
    talk = [*talk, {"role": "assistant", "content": ["Hi"]}, {"role": "user", "content": [{"text": "Hello"}]}]
    ids, _ = templated(tokenizer, talk, {}, spans=False)
    assert ids == tokenizer.apply_chat_template([one | {"content": content_text(one)} for one in talk])
    with pytest.raises(InvalidRequest, match="refuses"):
        templated(tokenizer, talk[:2], {}, spans=False)


def test_a_blank_message_has_no_tokens() -> None:
    """Though a token of the template goes across its place."""
    assert token_span([(0, 4), (4, 8)], (5, 5)) == token_span([(0, 4), (4, 8)], (4, 4)) == (0, 0)
    assert token_span([(0, 4), (4, 4), (4, 8)], (3, 5)) == (0, 3)
