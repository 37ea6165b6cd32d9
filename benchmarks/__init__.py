"""Questions answered by measuring: one package a question, `python -m benchmarks.NAME`."""
