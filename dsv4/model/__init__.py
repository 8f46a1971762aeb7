"""DeepSeek-V4 as stages over named tensors; numerics come from a plan, ops from a table."""
