"""Code that runs inside vLLM's own Python: given to it by path, never imported by tune."""
