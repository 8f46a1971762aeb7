"""RMSNorm, RoPE, FP8 quantiser and cache write of kv in one launch."""
