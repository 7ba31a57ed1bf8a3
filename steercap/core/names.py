"""Parser of point names: steercap's, TransformerLens's, those of a vLLM fork, and module paths.

A small grammar, matched and never evaluated:

- `resid_post[5]`, as points are shown;
- `blocks.5.hook_resid_post`, `blocks.5.attn.hook_z`: TransformerLens's names of tensors that exist here;
- `post_block`, `post_mlp[5]`: hooks of RhizoNymph's fork of vLLM, whose files `captures.fork_files` reads;
- `model.layers.5.mlp.down_proj.input`, `model.layers[5].mlp.output`, `model.norm.output`: input or output of a module.
  A `*` stands for all layers.

Names of uploads, of the keys of messages and of the variables of chat templates are checked here too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from steercap.core.values import choices, shown
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec, UnknownName

#: Pattern of the names of uploads, presets and SAEs, which are used in URLs and, behind "+", in names of models.
_UPLOAD_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Keys of messages that need no content.
_BESIDE_CONTENT: Final = (
    "tool_calls",
    "function_call",
    "tools",
    "reasoning_content",
    "reasoning",
    "thinking",
    "refusal",
)
#: Arguments of `apply_chat_template` that are always taken.
_ALWAYS: Final = frozenset({"add_generation_prompt", "continue_final_message", "chat_template"})
#: Further ones, which have no effect where they are empty.
_IF_EMPTY: Final = ("tools", "documents")
#: Site with equal rows, by TransformerLens's name within a block.
TRANSFORMER_LENS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hook_resid_pre": "resid_pre",
        "hook_resid_mid": "resid_mid",
        "hook_resid_post": "resid_post",
        "hook_attn_out": "attn_out",
        "hook_mlp_out": "mlp_out",
        "attn.hook_rot_q": "q",
        "attn.hook_rot_k": "k",
        "attn.hook_v": "v",
        "attn.hook_z": "z",
        "mlp.hook_post": "neurons",
    }
)
#: Site with equal rows, by hook of RhizoNymph's fork of vLLM; "post_block" is the later name of "post_mlp".
FORK_HOOKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pre_attn": "resid_pre",
        "post_attn": "resid_mid",
        "post_mlp": "resid_post",
        "post_block": "resid_post",
        **{name: name for name in ("mlp_in", "mlp_out")},
        **{f"mhc_streams_{where}": f"mhc_streams_{where}" for where in ("pre_attn", "pre_mlp", "final")},
        **{f"mhc_{mix}_mix": f"mhc_{mix}_mix" for mix in ("attn_post", "ffn_post", "attn_res", "ffn_res")},
    }
)
#: Difference from the nearest site, by TransformerLens's name without a site of equal rows.
_OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hook_embed": "it leaves out what is added for positions, which 'embed' holds",
        "hook_pos_embed": "'embed' holds it, and the token's embedding with it",
        "attn.hook_q": "it comes before rotary embedding, and 'q' (attn.hook_rot_q) after it",
        "attn.hook_k": "it comes before rotary embedding, and 'k' (attn.hook_rot_k) after it",
        "hook_attn_in": "it comes before the norm, for each head, and 'attn_in' after it; 'resid_pre' comes before it",
        "hook_mlp_in": "it comes before the norm, and 'mlp_in' after it; 'resid_mid' comes before it",
        "attn.hook_attn_scores": "'q' and 'k' are captured, and handle.attention(layer) computes weights from them",
        "attn.hook_pattern": "'q' and 'k' are captured, and handle.attention_pattern(layer) computes it from them",
        "mlp.hook_pre": "it comes before the activation function, and 'neurons' (mlp.hook_post) after it",
        "ln1.hook_normalized": "it leaves out the norm's weights, which 'attn_in' holds",
        "ln2.hook_normalized": "it leaves out the norm's weights, which 'mlp_in' holds",
        "ln_final.hook_normalized": "it leaves out the norm's weights, which 'final_norm' holds",
    }
)
#: Site with the rows of a whole layer's input or output.
_WHOLE: Final[Mapping[str, str]] = MappingProxyType({"input": "resid_pre", "output": "resid_post"})
_BLOCK: Final = re.compile(r"blocks\.(\d+|\*)\.(.+)", re.ASCII)
_SHOWN: Final = re.compile(r"(.+)\[(-?\d+)\]", re.ASCII)
_MODULE: Final = re.compile(r"(?:[A-Za-z_]\w*|\d+|\*)(?:\.(?:[A-Za-z_]\w*|\d+|\*))*\.(?:input|output)", re.ASCII)
_LAYER: Final = re.compile(r"\.(\d+|\*)\.", re.ASCII)
#: Name of a point in a file's tensors, such as "resid_post.5".
_OF_TENSOR: Final = re.compile(r"(\w+)\.(\d+)", re.ASCII)
#: Maximum number of digits of a layer index; Python refuses to parse thousands.
_DIGITS: Final = 9
#: Wildcard for the layer index in a module path.
EVERY: Final = "*"


class Name(NamedTuple):
    """Parsed name of a point.

    Args:
        site: name of the site; for a module, its path with `*` for the layer index.
        layer: layer index; None if the name has none.
    """

    site: str
    layer: int | None = None


def is_module(site: str) -> bool:
    """Check if the name of a site is a module path that ends in `.input` or `.output`."""
    return _MODULE.fullmatch(site) is not None


def read_name(name: str) -> Name:
    """Parse the name of a point to a site and a layer; the site need not exist.

    Raises:
        UnknownName: a TransformerLens name is unknown or has no site of equal rows, a path has several layers or is a
            whole layer, a name has two layer indices or is that of a file's tensor, or brackets contain something else
            than one index.
    """
    if "[" in name or "]" in name:
        return _bracketed(name)
    block = _BLOCK.fullmatch(name)
    layer, within = (block[1], block[2]) if block else (EVERY, name)
    if within in _OTHERS:
        raise UnknownName(f"{shown(name)} has no site of the same rows: {_OTHERS[within]}")
    if block and within not in TRANSFORMER_LENS:
        raise UnknownName(f"unknown name {shown(name)}; after 'blocks.<layer>.': {choices(within, TRANSFORMER_LENS)}")
    if within in TRANSFORMER_LENS:
        return Name(TRANSFORMER_LENS[within], None if layer == EVERY else _number(layer, name))
    if not is_module(name):
        if (tensor := _OF_TENSOR.fullmatch(name)) and tensor[1] in {*FORK_HOOKS.values(), *TRANSFORMER_LENS.values()}:
            raise UnknownName(f"{shown(name)} is a name of tensors in files; did you mean '{tensor[1]}[{tensor[2]}]'?")
        return Name(FORK_HOOKS.get(name, name))
    layers = _LAYER.findall(name)
    if name.count(EVERY) > 1 or (EVERY in name and layers[:1] != [EVERY]):
        raise UnknownName(f"{shown(name)}: the first number in a path is the layer, and only the layer may be '*'")
    if not layers:
        return Name(name)
    found = Name(_LAYER.sub(f".{EVERY}.", name, count=1), None if layers[0] == EVERY else _number(layers[0], name))
    if whole := _WHOLE.get(found.site.rpartition(f".{EVERY}.")[2]):
        same = whole if found.layer is None else f"{whole}[{found.layer}]"
        raise UnknownName(f"{shown(name)} is a whole layer, not a module in one; the same rows are {same!r}")
    return found


def _bracketed(name: str) -> Name:
    """Parse a name with a layer index in brackets."""
    if found := _SHOWN.fullmatch(name):
        inner = read_name(found[1])
        if inner.layer is not None:
            raise UnknownName(f"{shown(name)} gives its layer twice, {inner.layer} and {found[2]}; give it once")
        return inner._replace(layer=_number(found[2], name))
    path = re.sub(r"\[(\d+|\*)\]", r".\1", name, flags=re.ASCII)
    if is_module(path):
        return read_name(path)
    hint = "for several layers, give a name for each, or layers="
    raise UnknownName(f"{shown(name)}: brackets hold the number of one layer, as in 'resid_post[5]'; {hint}")


def _number(digits: str, name: str) -> int:
    """Parse the digits of a layer index in `name`; UnknownName if there are too many."""
    if len(digits) > _DIGITS:
        raise UnknownName(f"{shown(name)}: no model has so many layers; they count from 0, or from -1 backwards")
    return int(digits)


def require_upload_name(name: Any, what: str = "") -> None:
    """Check the name of an upload, a preset or an SAE; `what` says in the error which of them, "" for an argument.

    Raises:
        InvalidSpec: it is no text of 1 to 64 letters, digits, dots, dashes and underscores, or begins with a mark.
    """
    if not isinstance(name, str) or not _UPLOAD_NAME.fullmatch(name):
        said = f"{what} {shown(name)}:" if what else f"name={shown(name)};"
        raise InvalidSpec(f"{said} give letters, digits, dots, dashes and underscores, 64 at most")


def require_contents(conversation: Sequence[Mapping[str, Any]], templates: Sequence[str] = ()) -> None:
    """Check that the content of every message is text, parts or None, and left out only beside what a template reads.

    Args:
        conversation: {"role", "content"} dicts.
        templates: sources of the chat templates, whose keys of messages may be there instead; () if unknown.

    Raises:
        InvalidPrompt: a content is something else, or a message has none.
    """
    read = frozenset(_BESIDE_CONTENT).union(*map(_keys, templates)) - {"role", "name"}
    for index, message in enumerate(conversation):
        content = message.get("content")
        if not (content is None or isinstance(content, (str, list, tuple))):
            raise InvalidPrompt(f"message {index} has content={shown(content)}; give text, or a list of parts")
        if "content" not in message and not read.intersection(message):
            raise InvalidPrompt(
                f"message {index} has {', '.join(map(repr, message))}, and no 'content', so that its text would be "
                "left out; give {'role': ..., 'content': ...}"
            )


def template_sources(tokenizer: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the sources of the chat templates that `apply_chat_template` may choose from; [] if none is known."""
    own = getattr(tokenizer, "chat_template", None)
    given = kwargs.get("chat_template") or own
    if isinstance(own, Mapping):  # templates by name
        given = own.get(given, given) if isinstance(given, str) else given
    return [one for one in (given.values() if isinstance(given, Mapping) else [given]) if isinstance(one, str)]


def variables_of(tokenizer: Any, kwargs: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the arguments that the chat template reads; None unless it is one of transformers' that can be parsed."""
    known = [*map(_variables, template_sources(tokenizer, kwargs))]
    module = getattr(getattr(type(tokenizer), "apply_chat_template", None), "__module__", "")
    if not known or None in known or module != "transformers.tokenization_utils_base":
        return None
    return _ALWAYS.union(*(names or () for names in known))


def require_variables(kwargs: Mapping[str, Any], known: Callable[[], Collection[str] | None]) -> None:
    """Check that a chat template reads all further arguments; `known` returns those that it reads, None if unknown.

    Raises:
        InvalidRequest: it does not read one, which would have no effect.
    """
    given = [name for name, value in kwargs.items() if name not in _ALWAYS and (name not in _IF_EMPTY or value)]
    read = known() if given else None
    if read is not None and (wrong := [name for name in given if name not in read]):
        raise InvalidRequest(
            f"chat_template_kwargs has {wrong[0]!r}, which the chat template does not read; {choices(wrong[0], read)}"
        )


@functools.lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str] | None:
    """Return the names of the variables that a chat template reads; None if it is not plain Jinja."""
    from jinja2 import meta

    parsed = _parsed(source)
    return frozenset(meta.find_undeclared_variables(parsed)) - {"messages"} if parsed else None


@functools.lru_cache(maxsize=8)
def _keys(source: str) -> frozenset[Any]:
    """Return the keys that a chat template reads of messages: of whatever it reads "role" of."""
    from jinja2 import nodes

    found: list[tuple[str, Any]] = []
    parsed = _parsed(source)
    for one in parsed.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)) if parsed else ():
        match one:
            case (
                nodes.Getattr(node=holder, attr=key)
                | nodes.Getitem(node=holder, arg=nodes.Const(value=key))
                | nodes.Call(node=nodes.Getattr(node=holder, attr="get"), args=[nodes.Const(value=key), *_])
            ):
                found.append((repr(holder), key))
    messages = {holder for holder, key in found if key == "role"}
    return frozenset(key for holder, key in found if holder in messages)


def _parsed(source: str) -> Any:
    """Return a chat template as Jinja parses it; None if it is not plain Jinja."""
    from jinja2 import Environment, TemplateError

    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)  # a tag of transformers, without variables
    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(plain)
    except TemplateError:
        return None
