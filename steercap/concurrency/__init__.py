"""Asyncio and thread tools: event-loop ownership, bounded concurrency and progress lines."""
