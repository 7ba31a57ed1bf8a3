"""vLLM's own OpenAI-compatible server over an open model: requests capture and steer by one more field."""
