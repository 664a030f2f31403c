"""Ollama's API, as a translation onto chat completions and the pooling endpoints."""
