"""The HTTP side: OpenAI-compatible and native endpoints over :class:`bough.engine.async_engine.AsyncEngine`."""
