"""The same core under asyncio: real engines, a real trainer, real failures."""
