"""Results of pooling models: vLLM's pooled output for each prompt, and no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from steercap.core.receipt import SteeringReceipt
from steercap.errors import InvalidRequest

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

#: Pooling tasks that return an embedding: of the prompt, or of each token.
_EMBEDDINGS: Final = ("embed", "token_embed")


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """Output of a pooling model for one prompt.

    Args:
        data: vLLM's pooled output, on the CPU, in the dtype of the model's head (float32 unless it says otherwise):
            [dim] for "embed", [classes] for "classify", [tokens, dim] for "token_embed", [tokens, classes] for
            "token_classify". Its activation (normalisation, softmax, sigmoid) is applied unless `use_activation=False`.
        task: the pooling task, one of the four.
        prompt_token_ids: token ids of the prompt, special tokens that the tokenizer adds included.
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
            InvalidRequest: the task is no embedding task; its result is in `data`.
        """
        if self.task not in _EMBEDDINGS:
            raise InvalidRequest(f"task {self.task!r} gives no embedding; its result is in `data`")
        return self.data

    def __repr__(self) -> str:
        return f"Encoded({self.task}, {list(self.data.shape)}, {len(self.prompt_token_ids)} tokens)"


def require_kind(engine: Engine, name: str, *, pools: bool) -> None:
    """Check that a call is for the kind of model that is open.

    Args:
        engine: the model's engine.
        name: name of the call, for the message.
        pools: True if the call is for pooling models; False if it is for models that generate.

    Raises:
        InvalidRequest: it is not; the message names the call to use instead.
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
    """Return the pooling parameters of the start-up test: a per-token task if the model has one, without activation."""
    tasks, default = await engine.vllm.tasks()
    of_tokens = [task for task in tasks if task.startswith("token_")]
    return {"task": of_tokens[0] if of_tokens else default, "use_activation": False}
