"""The language: plain Python that describes a program of many model calls, run by one event loop."""
