"""vLLM's OpenAI-compatible server over an open model: requests capture and steer by an additional field, `steercap`."""
