"""Weighted sum of the streams, RMSNorm and NVFP4 quantiser in one launch."""
