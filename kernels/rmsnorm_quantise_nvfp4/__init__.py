"""RMSNorm and NVFP4 quantiser in one launch."""
