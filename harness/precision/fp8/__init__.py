"""fp8 matmuls: quantization, GEMMs, scales and range statistics."""
