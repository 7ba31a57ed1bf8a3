"""Pure data and logic: values, tokens, specs, plans, frames, budgets. No I/O, no asyncio, no torch."""
