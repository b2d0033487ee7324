"""Products in fp8: how numbers are rounded, multiplied and watched."""
