"""vLLM's types by name, for annotations elsewhere: only adapters import vLLM. Nothing imports this to run."""

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM", "PoolingParams", "PoolingRequestOutput", "RequestOutput", "SamplingParams"]
