"""Results of pooling models: vLLM's pooled output for each prompt, and no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from steercap.core.receipt import SteeringReceipt
from steercap.errors import InvalidRequest

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

#: Tasks that give an embedding: of the prompt, or of each token.
_EMBEDDINGS: Final = ("embed", "token_embed")


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """Output of a pooling model for one prompt.

    Args:
        data: vLLM's pooled output, on the CPU, in the dtype of the model's head (float32 unless it says otherwise):
            [dim] for "embed", [classes] for "classify", [tokens, dim] for "token_embed", [tokens, classes] for
            "token_classify". Normalised, or through softmax or sigmoid, unless `use_activation=False` was asked for.
        task: the pooling task, one of these.
        prompt_token_ids: the prompt's tokens, with those that the tokenizer adds.
        steering: receipt of the edits; None without steering.
    """

    data: torch.Tensor
    task: str
    prompt_token_ids: tuple[int, ...]
    steering: SteeringReceipt | None = None

    @property
    def embedding(self) -> torch.Tensor:
        """Embedding of the prompt, [dim], or of each token, [tokens, dim].

        Raises:
            InvalidRequest: the task was another; `data` has what it gave.
        """
        if self.task not in _EMBEDDINGS:
            raise InvalidRequest(f"task {self.task!r} gives no embedding; its result is in `data`")
        return self.data

    def __repr__(self) -> str:
        return f"Encoded({self.task}, {list(self.data.shape)}, {len(self.prompt_token_ids)} tokens)"


def require_kind(engine: Engine, name: str, *, pools: bool) -> None:
    """Check that the model can serve a call.

    Args:
        engine: the model's engine.
        name: name of the call.
        pools: True if the call is for pooling models; False if it is for models that generate.

    Raises:
        InvalidRequest: it is not; the message names the call that is.
    """
    if pools == engine.vllm.pools:
        return
    model = engine.vllm.model_name
    if pools:
        raise InvalidRequest(
            f"{name}: {model} was opened to generate; use generate or read, or open it with "
            'SteerModel(..., runner="pooling")'
        )
    raise InvalidRequest(
        f"{name}: {model} was opened as a pooling model, which generates nothing and has no logits; use encode or "
        'read, or open it with SteerModel(..., runner="generate") if it has an unembedding'
    )


async def probing(engine: Engine) -> dict[str, Any]:
    """Return the pooling parameters of the start-up proof: a per-token task if there is one, without activation."""
    tasks, default = await engine.vllm.tasks()
    of_tokens = [task for task in tasks if task.startswith("token_")]
    return {"task": of_tokens[0] if of_tokens else default, "use_activation": False}
