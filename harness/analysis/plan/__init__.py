"""Plans a run before it starts: parameters, FLOPs, memory, traffic, step time, price, and whether it fits."""
