"""Number formats of the matmuls: fp32, bf16, fp16 with loss scaling, fp8."""
