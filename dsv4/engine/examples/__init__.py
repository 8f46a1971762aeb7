"""Two engines that are audited as any other: transformers through hooks, and a compiled layer in C++."""
