"""`1bit serve`: a supervisor for local LLM servers that says ready only when they are warm."""

__version__ = "0.1.0"
