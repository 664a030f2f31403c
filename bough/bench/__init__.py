"""Measurements: of any OpenAI-compatible server, of the engine in this process, of the scheduler alone."""
