"""vLLM's types for annotations in other folders, since only adapters import vLLM; never imported at run time."""

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM", "PoolingParams", "PoolingRequestOutput", "RequestOutput", "SamplingParams"]
